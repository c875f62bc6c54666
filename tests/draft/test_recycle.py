"""RecycleDrafter: its trees against an exhaustive search, what it learns, and the text it must not alter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from native_models import CASES, case_runner
from paceline.draft.recycle import RecycleDrafter
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.params import SamplingParams
from paceline.testing import CharTokenizer
from paceline.types import Draft, Observation, RequestView, Verdict
from toy_engine import PROMPT, TOKENIZER, make_engine, run

V = 12


def view(token_ids: Sequence[int] | np.ndarray, request_id: str = "r") -> RequestView:
    ids = np.asarray(token_ids, dtype=np.int32)
    return RequestView(request_id, ids, len(ids), SamplingParams(), seed=0, stream=0, attempt=0)


def propose(drafter: RecycleDrafter, token_ids: Sequence[int], budget: int) -> Draft | None:
    (draft,) = drafter.propose([view(token_ids)], [budget])
    return draft


def observe(
    drafter: RecycleDrafter,
    seen: RequestView,
    draft: Draft | None,
    verdict: Verdict | None,
    successors: Sequence[Sequence[int]] | None,
) -> None:
    rows = None if successors is None else np.array(successors, dtype=np.int32)
    drafter.observe(Observation([seen], [draft], [verdict], {}, np.array([0, 1]), [rows]))


def best_first(start: int, *, skip: int = -1) -> list[int]:
    return [(start + i) % V for i in range(V) if (start + i) % V != skip][: RecycleDrafter.num_successors]


def paths(draft: Draft) -> dict[tuple[int, ...], float]:
    """Token path of each node -> product of the confidences along it."""
    assert draft.confidence is not None
    found: list[tuple[tuple[int, ...], float]] = []
    for token, parent, rate in zip(draft.token_ids.tolist(), draft.parents.tolist(), draft.confidence, strict=True):
        above, reach = ((), 1.0) if parent < 0 else found[parent]
        found.append(((*above, token), reach * float(rate)))
    assert len(dict(found)) == len(draft), "a path is there twice"
    return dict(found)


def learned(seed: int, *, num_rows: int = 40, **options: Any) -> RecycleDrafter:
    """A drafter that has seen random rows; some tokens and most pairs stay unknown."""
    rng, drafter = np.random.default_rng(seed), RecycleDrafter(vocab_size=V, **options)
    for _ in range(num_rows):
        text = rng.integers(0, V - 2, 2)
        row = rng.permutation(V)[: drafter.num_successors]
        final = row[0] if rng.random() < 0.6 else row[1]
        observe(drafter, view(text), None, Verdict((), int(final), "bonus"), [row])
    return drafter


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 40), st.sampled_from([0.0, 0.03, 0.15]))
def test_proposes_the_likeliest_paths(seed, budget, least_reach):
    drafter = learned(seed, least_reach=least_reach)
    draft = propose(drafter, [1, 2], budget)
    if draft is None:
        return
    assert draft.token_ids.dtype == draft.parents.dtype == np.int32
    assert len(draft) <= budget
    assert draft.source == "recycle"
    ours = paths(draft)
    assert min(ours.values()) >= least_reach
    # All one-node extensions of the tree, by asking for far more: none is likelier than a node that was taken.
    larger = propose(learned(seed, least_reach=0.0), [1, 2], 64)
    assert larger is not None
    left_out = [reach for path, reach in paths(larger).items() if path not in ours and path[:-1] in {(), *ours}]
    likeliest = max(left_out, default=0.0)
    assert likeliest <= min(ours.values()) + 1e-12
    assert len(draft) == budget or likeliest < least_reach or not left_out


def test_budget_of_unknown_nodes_goes_to_others():
    drafter = RecycleDrafter(vocab_size=V, least_reach=0.0)
    observe(drafter, view([3]), None, Verdict((), 5, "bonus"), [best_first(5)])
    draft = propose(drafter, [3], 6)
    assert draft is not None
    assert draft.token_ids.tolist() == best_first(5)[:6]
    assert (draft.parents == -1).all()


def test_nothing_is_proposed_where_nothing_is_known():
    assert propose(RecycleDrafter(vocab_size=V), [1, 2], 8) is None
    assert propose(RecycleDrafter(vocab_size=V), [1], 8) is None


def test_learns_from_every_row_and_most_from_the_accepted_ones():
    drafter = RecycleDrafter(vocab_size=V)
    # Root 1; nodes 2 and 3 below it, 2 again below 3. Accepted: 3.
    draft = Draft(np.array([2, 3, 2], np.int32), np.array([-1, -1, 1], np.int32), source="recycle")
    rows = [best_first(3), best_first(4), best_first(5), best_first(6)]
    observe(drafter, view([0, 1]), draft, Verdict((1,), 5, "recovered"), rows)
    for text, expected in (([0, 1], 3), ([1, 2], 4), ([1, 3], 5), ([3, 2], 6), ([7, 2], 6), ([7, 3], 5), ([7, 1], 3)):
        got = propose(drafter, text, 1)
        assert got is not None
        assert got.token_ids.tolist() == [expected], text
    accepted_last = Draft(np.array([2, 2], np.int32), np.array([-1, 0], np.int32), source="recycle")
    observe(drafter, view([0, 1]), accepted_last, Verdict((0,), 9, "recovered"), [best_first(2), *rows[2:]])
    got = propose(drafter, [7, 2], 1)
    assert got is not None
    assert got.token_ids.tolist() == [5]  # row of the accepted 2, though that of the rejected one came later


def test_nothing_is_learned_of_requests_without_speculation():
    drafter, ids = RecycleDrafter(vocab_size=V), np.array([4, 5, 6, 7], dtype=np.int32)
    plain = RequestView("r", ids, 4, SamplingParams(speculation=False), seed=0, stream=0, attempt=0)
    observe(drafter, plain, None, Verdict((), 8, "bonus"), [best_first(8)])
    assert propose(drafter, [4, 5], 2) is None
    assert propose(drafter, [6, 7], 2) is None


def test_a_prompt_is_read_once_and_again_after_its_release():
    drafter = RecycleDrafter(vocab_size=V)
    seen = view([4, 5, 6, 7])
    observe(drafter, seen, None, None, None)
    draft = propose(drafter, [4, 5], 2)
    assert draft is not None
    assert draft.token_ids.tolist() == [6, 7]
    observe(drafter, view([4, 5]), None, Verdict((), 8, "bonus"), [best_first(8)])
    other = propose(drafter, [4, 5], 1)
    assert other is not None
    assert other.token_ids.tolist() == [8]
    drafter.release("r")
    observe(drafter, seen, None, None, None)
    again = propose(drafter, [4, 5], 1)
    assert again is not None
    assert again.token_ids.tolist() == [6]


def test_what_was_written_in_steps_of_which_it_was_not_told_is_read_when_it_is_asked():
    drafter = RecycleDrafter(vocab_size=V)
    observe(drafter, view([4, 5]), None, Verdict((), 8, "bonus"), [best_first(8)])
    propose(drafter, [4, 5, 8, 9, 4, 9], 1)
    for known, next_token in (([4, 5], 8), ([5, 8], 9), ([8, 9], 4), ([9, 4], 9)):
        draft = drafter.propose([view(known, "other")], [1])[0]
        assert draft is not None
        assert draft.token_ids.tolist() == [next_token]


def test_confidence_becomes_what_is_accepted():
    drafter, rng = RecycleDrafter(vocab_size=V, least_reach=0.0), np.random.default_rng(1)
    row = best_first(5)
    for _ in range(500):
        draft = propose(drafter, [3], 4)
        token = row[rng.choice(3, p=[0.6, 0.3, 0.1])]
        ids = [] if draft is None else draft.token_ids.tolist()
        path = (ids.index(token),) if token in ids else ()
        verdict = Verdict(path, 11 if path else token, "recovered")
        unknown = [[-1] * len(row)] * len(ids)
        observe(drafter, view([3]), draft, verdict, [row, *unknown])
    draft = propose(drafter, [3], 3)
    assert draft is not None
    assert draft.token_ids.tolist() == row[:3]
    assert draft.confidence == pytest.approx([0.6, 0.3, 0.1], abs=0.08)


def test_chain_is_the_best_path_only():
    draft = propose(learned(3, chain=True, least_reach=0.0), [1, 2], 6)
    assert draft is not None
    assert draft.is_chain
    assert len(draft) > 1


def test_the_table_outlives_the_drafter_in_a_file(tmp_path):
    path = tmp_path / "table.npz"
    drafter = learned(5, table=path, fingerprint="abc", least_reach=0.0)
    drafter.close()
    expected = propose(drafter, [1, 2], 20)
    got = propose(RecycleDrafter(vocab_size=V, table=path, fingerprint="abc", least_reach=0.0), [1, 2], 20)
    assert expected is not None
    assert got is not None
    assert paths(got) == paths(expected)


def test_without_a_file_nothing_is_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learned(5).close()
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_could_not_be_written_is_refused_at_once(tmp_path, monkeypatch):
    for table in (tmp_path / "none" / "table.npz", tmp_path, tmp_path / ("n" * 250), tmp_path / "a\0b", "/dev/null"):
        with pytest.raises(ConfigError, match="table must be a file in a folder that can be written to; got "):
            RecycleDrafter(vocab_size=V, table=table)
    assert list(tmp_path.iterdir()) == []

    def read_only(self):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "touch", read_only)
    with pytest.raises(ConfigError, match="create the folder, or give another name"):
        RecycleDrafter(vocab_size=V, table=tmp_path / "table.npz")


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_that_of_plain_decoding(chain, temperature):
    params = [
        SamplingParams(max_tokens=40, seed=seed, temperature=temperature, ignore_eos=True, n=1 + seed % 2)
        for seed in range(4)
    ]
    prompts = [PROMPT[: 4 + 3 * i] for i in range(4)]
    drafter = RecycleDrafter(vocab_size=TOKENIZER.vocab_size, chain=chain, least_reach=0.0)
    engine = make_engine(drafter=drafter, num_draft_tokens=8)
    ours, plain = run(engine, prompts, params), run(make_engine(), prompts, params)
    assert [[c.token_ids for c in o.outputs] for o in ours] == [[c.token_ids for c in o.outputs] for o in plain]
    assert engine.metrics.num_accepted_tokens > 10
    assert drafter._known == {}, "requests that are over are forgotten"


def test_text_is_that_of_plain_decoding_on_the_native_engine():
    alphabet = "".join(map(chr, range(33, 33 + CASES["int4"][0].vocab_size - 2)))
    tokenizer = CharTokenizer(alphabet)
    prompts = [tokenizer.encode("ABCABCAB"), tokenizer.encode("HELLO"), [7]]
    params = SamplingParams(max_tokens=32, ignore_eos=True)

    def make(**options: Any) -> Engine:
        runner: Any = case_runner("int4", block_size=4)
        return make_engine(runner=runner, tokenizer=tokenizer, num_draft_tokens=8, **options)

    engine = make(drafter=RecycleDrafter(vocab_size=tokenizer.vocab_size, least_reach=0.0))
    ours, plain = run(engine, prompts, params), run(make(), prompts, params)
    assert [output.token_ids for output in ours] == [output.token_ids for output in plain]
    assert engine.metrics.num_accepted_tokens > 0
