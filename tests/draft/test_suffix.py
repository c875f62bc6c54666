"""SuffixDrafter against its definition written with lists, and against plain decoding."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import LLM, CacheConfig, EngineConfig
from paceline.draft.suffix import SuffixDrafter
from paceline.errors import ConfigError
from paceline.models.runners import native_available
from paceline.params import SamplingParams
from paceline.testing import ToyModel
from paceline.types import Draft, Observation, RequestView, Verdict
from toy_engine import PROMPT, TOKENIZER, make_engine, run

texts = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.lists(st.integers(0, 6), min_size=1, max_size=24),
    st.builds(lambda unit, times: unit * times, st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 6)),
)


def view(token_ids: list[int] | np.ndarray, *, request_id: str = "r", prompt_length: int = 1) -> RequestView:
    ids = np.array(token_ids, dtype=np.int32)
    ids.flags.writeable = False
    return RequestView(request_id, ids, prompt_length, SamplingParams(), seed=0, stream=0, attempt=0)


def propose(drafter: SuffixDrafter, token_ids: list[int], budget: int, **where) -> Draft | None:
    (draft,) = drafter.propose([view(token_ids, **where)], [budget])
    return draft


def as_lists(draft: Draft | None) -> tuple[list[int], list[int], list[float]] | None:
    if draft is None:
        return None
    assert draft.confidence is not None
    assert draft.token_ids.dtype == draft.parents.dtype == np.int32
    return draft.token_ids.tolist(), draft.parents.tolist(), draft.confidence.tolist()


class Definition:
    """The drafter's docstring, counting strings in a text that is shorter than any limit on their length."""

    def __init__(self, text: list[int], *, min_probability: float, chain: bool) -> None:
        self.text, self.min_probability, self.chain = tuple(text), min_probability, chain

    def ends(self, string: tuple[int, ...]) -> list[int]:
        text, n = self.text, len(string)
        return [e for e in range(n, len(text) + 1) if text[e - n : e] == string]

    def shorter(self, string: tuple[int, ...]) -> tuple[int, ...]:
        """The longest suffix that occurs elsewhere, too."""
        count = len(self.ends(string))
        return next(string[n:] for n in range(1, len(string) + 1) if len(self.ends(string[n:])) > count)

    def followers(self, string: tuple[int, ...]) -> list[tuple[float, int, int]]:
        """(probability, latest occurrence, token), the likeliest first."""
        while string and all(e == len(self.text) for e in self.ends(string)):
            string = self.shorter(string)
        if not string:
            return []
        followed = [e for e in self.ends(string) if e < len(self.text)]
        found = []
        for token in {self.text[e] for e in followed}:
            places = [e + 1 for e in followed if self.text[e] == token]
            found.append((len(places) / (len(followed) + 2.0 / len(string)), places[-1], token))
        found.sort(reverse=True)
        return found[:1] if self.chain else found

    def context(self, string: tuple[int, ...]) -> tuple[int, ...]:
        """What is known after a node: the string, shortened where it never went on."""
        while string and all(e == len(self.text) for e in self.ends(string)):
            string = self.shorter(string)
        return string

    def tree(self, match: tuple[int, ...], num_nodes: int):
        nodes: list[tuple[int, int, float]] = []
        score = 0.0
        open_nodes = []
        parent, string, path = -1, match, 1.0
        while len(nodes) < num_nodes:
            string = self.context(string)
            for probability, latest, token in self.followers(string):
                if path * probability >= self.min_probability:
                    open_nodes.append((-path * probability, -latest, token, probability, parent, string))
            if not open_nodes:
                break
            best = min(open_nodes)
            open_nodes.remove(best)
            path, token, probability = -best[0], best[2], best[3]
            nodes.append((token, best[4], probability))
            score += path
            parent, string = len(nodes) - 1, (*best[5], token)
        return score, nodes

    def draft(self, budget: int, factor: float, offset: float):
        text = self.text
        repeated = [n for n in range(1, len(text)) if len(self.ends(text[len(text) - n :])) > 1]
        best = (0.0, [])
        if repeated:
            match = text[len(text) - max(repeated) :]
            for string in (match, self.shorter(match)):
                num_nodes = min(budget, int(factor * len(string) + offset))
                if string and num_nodes > best[0]:
                    best = max(best, self.tree(string, num_nodes), key=lambda tree: tree[0])
        return tuple(list(column) for column in zip(*best[1], strict=True)) if best[1] else None


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    texts,
    st.integers(1, 12),
    st.sampled_from([(4.0, 0.0), (1.0, 0.0), (1.0, -1.0), (0.5, 2.0)]),
    st.sampled_from([0.05, 0.15, 0.4]),
    st.booleans(),
)
def test_equals_the_definition(text, budget, size, min_probability, chain):
    factor, offset = size
    drafter = SuffixDrafter(factor=factor, offset=offset, min_probability=min_probability, chain=chain)
    definition = Definition(text, min_probability=min_probability, chain=chain)
    assert as_lists(propose(drafter, text, budget)) == definition.draft(budget, factor, offset)


@settings(derandomize=True, deadline=None)
@given(texts, st.lists(st.integers(1, 3), max_size=8))
def test_a_text_that_grows_is_drafted_as_one_seen_at_once(text, steps):
    growing = SuffixDrafter()
    known = 1
    for step in [0, *steps]:
        known = min(known + step, len(text))
        assert as_lists(propose(growing, text[:known], 6)) == as_lists(propose(SuffixDrafter(), text[:known], 6))


@settings(derandomize=True, deadline=None)
@given(texts, texts)
def test_another_text_under_the_same_id_is_begun_anew(first, second):
    drafter = SuffixDrafter()
    propose(drafter, first, 6)
    assert as_lists(propose(drafter, second, 6)) == as_lists(propose(SuffixDrafter(), second, 6))


def test_requests_of_a_batch_do_not_mix():
    drafter = SuffixDrafter()
    for known in (5, 6, 8):
        several = {"a": [1, 2, 3, 1, 2, 3, 4, 1][:known], "b": [2, 1, 7, 2, 1, 7, 2, 1][:known], "c": [5] * known}
        drafts = drafter.propose([view(ids, request_id=name) for name, ids in several.items()], [3, 4, 5])
        alone = [propose(SuffixDrafter(), ids, b) for ids, b in zip(several.values(), [3, 4, 5], strict=True)]
        assert [as_lists(draft) for draft in drafts] == [as_lists(draft) for draft in alone]


def test_what_followed_in_different_ways_becomes_a_tree():
    draft = propose(SuffixDrafter(min_probability=0.1), [1, 2, 3, 7, 4, 1, 2, 3, 8, 5, 1, 2, 3], 4)
    assert draft is not None
    assert draft.source == "suffix"
    assert draft.token_ids.tolist()[:2] == [8, 7]  # the newest of equals first
    assert draft.parents.tolist()[:2] == [-1, -1]
    assert not draft.is_chain


def test_chain_follows_the_likeliest():
    text = [1, 2, 7, 0, 1, 2, 8, 3, 1, 2, 8, 4, 1, 2]
    draft = propose(SuffixDrafter(chain=True, min_probability=0.01), text, 3)
    assert draft is not None
    assert draft.is_chain
    assert draft.token_ids.tolist() == [8, 4, 1]


@pytest.mark.parametrize("unit", [[5], [1, 2], [1, 2, 3]])
def test_repetition_is_extended_beyond_the_end(unit):
    text = unit * 12
    draft = propose(SuffixDrafter(), text, 8)
    assert draft is not None
    assert draft.is_chain
    assert draft.token_ids.tolist() == (unit * 8)[:8]


def test_nothing_is_guessed_from_what_never_occurred():
    assert propose(SuffixDrafter(), [1, 2, 3, 4], 4) is None
    assert propose(SuffixDrafter(), [1], 4) is None


def test_a_long_match_makes_a_long_draft():
    def size(match: int) -> int:
        text = [*range(20), 99, *range(20 - match, 20)]
        draft = propose(SuffixDrafter(factor=1.0, min_probability=0.01), [*text[20 - match :]], 64)
        return 0 if draft is None else len(draft)

    assert [size(match) for match in (1, 2, 5, 9)] == [1, 2, 5, 9]


def test_paths_are_as_likely_as_asked_for():
    rng = np.random.default_rng(2)
    text = rng.integers(0, 4, 400).tolist()
    draft = propose(SuffixDrafter(min_probability=0.2), text, 32)
    assert draft is not None
    assert draft.confidence is not None
    for node in range(len(draft)):
        path, at = [], node
        while at >= 0:
            path.append(at)
            assert draft.parents[at] < at
            at = draft.parents[at]
        assert prod(draft.confidence[path[::-1]].tolist()) >= 0.2


def test_strings_longer_than_are_counted_still_match():
    unit = list(range(100, 150))
    draft = propose(SuffixDrafter(), [*unit, 7, *unit], 4)
    assert draft is not None
    assert draft.token_ids.tolist() == [7, 100, 101, 102]


def step(drafter: SuffixDrafter, token_ids: list[int], draft: Draft | None, verdict: Verdict | None, **where) -> None:
    where = {"request_id": "r", "prompt_length": 1, **where}
    starts = np.array([0, 1], dtype=np.int32)
    drafter.observe(Observation([view(token_ids, **where)], [draft], [verdict], {}, starts, [None]))


def finish(drafter: SuffixDrafter, prompt: list[int], output: list[int], request_id: str) -> None:
    """A request whose last step emits the output's last token."""
    known = [*prompt, *output[:-1]]
    draft = propose(drafter, known, 4, request_id=request_id, prompt_length=len(prompt))
    where = {"request_id": request_id, "prompt_length": len(prompt)}
    step(drafter, known, draft, Verdict((), output[-1], "recovered"), **where)
    drafter.release(request_id)


def test_past_outputs_are_copied_to_their_last_token():
    drafter = SuffixDrafter(store_tokens=100)
    finish(drafter, [30, 31], [1, 2, 3, 4, 5, 6], "a")
    draft = propose(drafter, [9, 1, 2, 3], 8, request_id="b")
    assert draft is not None
    assert draft.token_ids.tolist() == [4, 5, 6]  # never the separator after it
    assert propose(drafter, [9, 30], 8, request_id="c") is None  # prompts are not stored


def test_nothing_is_shared_unless_asked_for():
    drafter = SuffixDrafter()
    finish(drafter, [30, 31], [1, 2, 3, 4, 5, 6], "a")
    assert propose(drafter, [9, 1, 2, 3], 8, request_id="b") is None


def test_a_preempted_request_is_stored_once():
    drafter = SuffixDrafter(store_tokens=100)
    for output in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]):
        propose(drafter, [9, *output], 4, request_id="a")
        drafter.release("a")
    assert drafter.store is not None
    assert drafter.store.num_tokens == 5 + 3  # and a separator for each part
    drafter.store.check_integrity()


def test_the_better_of_own_and_past_text_is_taken():
    drafter = SuffixDrafter(store_tokens=100)
    finish(drafter, [30], [1, 2, 3, 4, 5, 6, 7], "a")
    own = propose(drafter, [5, 50, 51, 9, 3, 4, 5], 3, request_id="b")  # a longer string is known from the past
    assert own is not None
    assert own.token_ids.tolist() == [6, 7]


def test_too_small_a_store_is_refused():
    with pytest.raises(ConfigError, match="store_tokens must be"):
        SuffixDrafter(store_tokens=1)


@pytest.mark.parametrize("num_blocks", [64, 33], ids=["room", "preemption"])
@pytest.mark.parametrize("options", [{}, {"chain": True}, {"store_tokens": 64}], ids=["tree", "chain", "store"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_text_is_that_of_plain_decoding(options, temperature, num_blocks):
    params = SamplingParams(temperature=temperature, max_tokens=40, seed=3, n=2, ignore_eos=True)
    prompts = [PROMPT, PROMPT[3:], PROMPT[:6], [5, 5, 5]]

    def engine(drafter: SuffixDrafter | None):
        runner = ToyModel(
            vocab_size=TOKENIZER.vocab_size, seed=3, order=2, num_blocks=num_blocks, block_size=4, max_model_len=128
        )
        return make_engine(drafter=drafter, num_draft_tokens=6, runner=runner)

    plain = run(engine(None), prompts, params)
    drafter = SuffixDrafter(**options)
    drafting = engine(drafter)
    drafted = run(drafting, prompts, params)
    assert [[c.token_ids for c in o.outputs] for o in drafted] == [[c.token_ids for c in o.outputs] for o in plain]
    assert drafting.metrics.num_accepted_tokens > 0
    if drafter.store is not None:
        drafter.store.check_integrity()


def test_a_request_asked_again_is_quicker_with_a_store():
    drafter = SuffixDrafter(store_tokens=1000)
    engine = make_engine(drafter=drafter, num_draft_tokens=8)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
    (first,) = run(engine, [PROMPT], params)
    (second,) = run(engine, [PROMPT], params)
    assert second.token_ids == first.token_ids
    assert second.metrics.num_steps < first.metrics.num_steps


@pytest.mark.skipif(not native_available(), reason="the native engine is not built")
def test_native_engine_writes_the_same_ids(tiny_llama):
    config = EngineConfig(engine="native", num_threads=1, cache=CacheConfig(kv_cache_memory=16 << 20))
    prompt = [3, 4, 5, 6, 3, 4, 5, 6, 3, 4]
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=48, temperature=temperature, seed=2, ignore_eos=True)
        (plain,) = LLM(str(tiny_llama), config=config, speculation="none").generate([prompt], params)
        (drafted,) = LLM(str(tiny_llama), config=config, speculation="suffix").generate([prompt], params)
        assert drafted.token_ids == plain.token_ids
        assert drafted.metrics.num_draft_tokens > 0
