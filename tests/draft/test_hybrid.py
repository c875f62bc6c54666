"""HybridDrafter: which nodes it keeps, who gets the credit, and that none of it can alter the text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import LLM, CacheConfig, EngineConfig, SamplingParams
from paceline.control.policy import FixedLength
from paceline.draft.hybrid import HybridDrafter, TrackRecord
from paceline.draft.ngram import NgramDrafter
from paceline.errors import ConfigError, DraftMismatchError
from paceline.testing import ScriptedDrafter
from paceline.types import Draft, DraftLaw, Observation, RequestView, Verdict
from toy_engine import PROMPT, TOKENIZER, make_engine, oracle, run

V = TOKENIZER.vocab_size


class Scripted(ScriptedDrafter):
    """Named, and notes what it is told."""

    def __init__(self, name: str, script, *, num_successors: int = 0, hidden_layers=()) -> None:
        super().__init__(script)
        self.name = name
        self.num_successors = num_successors
        self.hidden_layers = hidden_layers
        self.told: list[tuple] = []
        self.released: list[str] = []

    def observe(self, step: Observation) -> None:
        self.told.append((step.drafts, step.verdicts, step.hidden, step.starts, step.successors))

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


def view(token_ids: Sequence[int] = (2, 3), request_id: str = "r") -> RequestView:
    return RequestView(request_id, np.array(token_ids, np.int32), 1, SamplingParams(), seed=0, stream=0, attempt=0)


def tree(token_ids, parents, confidence=None) -> Draft:
    claims = None if confidence is None else np.array(confidence, float)
    return Draft(np.array(token_ids, np.int32), np.array(parents, np.int32), confidence=claims)


def merge(*drafts: Draft | Sequence[int] | None, budget: int = 8) -> Draft | None:
    members = [Scripted(name, lambda _, draft=draft: draft) for name, draft in zip("abc", drafts, strict=False)]
    return HybridDrafter(members, vocab_size=V).propose([view()], [budget])[0]


def paths(draft: Draft) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_equal_paths_are_one_node() -> None:
    merged = merge(*(tree([5, 6, last], [-1, 0, 1], [0.9] * 3) for last in (7, 8)), None)
    assert merged is not None
    assert paths(merged) == [(5,), (5, 6), (5, 6, 7), (5, 6, 8)]
    assert merged.proposers == (("a", "b"), ("a", "b"), ("a",), ("b",))
    assert merged.source == "a+b+c"


def test_nothing_to_merge_is_no_draft() -> None:
    assert merge(None, [], None) is None


def test_a_merged_chain_is_a_chain() -> None:
    merged = merge([5, 6], [5, 6, 8])
    assert merged is not None
    assert merged.is_chain


@st.composite
def trees(draw) -> Draft | None:
    size = draw(st.integers(0, 8))
    if not size:
        return None
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    tokens = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    claims = st.floats(0, 1, width=32)
    return tree(tokens, parents, draw(st.none() | st.lists(claims, min_size=size, max_size=size)))


@settings(max_examples=150, deadline=None)
@given(drafts=st.lists(trees(), min_size=1, max_size=3), budget=st.integers(1, 12))
def test_the_nodes_kept_are_the_most_likely_ones(drafts, budget) -> None:
    """Against all paths of all drafts, ranked by the product of their best claims."""
    drafts = [d and tree(d.token_ids[:budget], d.parents[:budget], c_of(d, budget)) for d in drafts]
    best: dict[tuple[int, ...], float] = {}  # path -> highest claim
    behind: dict[tuple[int, ...], set[str]] = {}
    for name, draft in zip("abc", drafts, strict=False):
        for path, claim in zip(paths(draft), claims_of(draft), strict=True) if draft else ():
            best[path] = max(best.get(path, 0.0), claim)
            behind.setdefault(path, set()).add(name)
    reach = {path: math.prod(best[path[: n + 1]] for n in range(len(path))) for path in best}
    worth = {path for path in best if reach[path] >= 0.25}
    merged = merge(*drafts, budget=budget)
    if merged is None:
        assert not worth
        return
    kept = paths(merged)
    assert len(set(kept)) == len(kept) == min(budget, len(worth))
    worst = min(reach[path] for path in kept)
    assert all(reach[path] <= worst for path in worth - set(kept))
    assert merged.confidence is not None
    assert merged.proposers is not None
    np.testing.assert_allclose(merged.confidence, [best[path] for path in kept])
    assert [set(names) for names in merged.proposers] == [behind[path] for path in kept]


def c_of(draft: Draft, budget: int):
    return None if draft.confidence is None else draft.confidence[:budget]


def claims_of(draft: Draft) -> list[float]:
    return [0.5] * len(draft) if draft.confidence is None else draft.confidence.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("budget", [1, 5, 16])
def test_the_text_is_that_of_plain_decoding(temperature: float, budget: int) -> None:
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=30, ignore_eos=True, frequency_penalty=0.3, n=2)
    prompts = [PROMPT, PROMPT[:6], [3, 4, 3, 4, 3]]
    plain = run(make_engine(), prompts, params)
    answer = [*PROMPT, *plain[0].token_ids]
    hybrid = HybridDrafter(
        [
            NgramDrafter(min_ngram=1),
            Scripted("oracle", oracle(answer, wrong_at=frozenset(range(20, 40, 3)))),
            Scripted("tree", oracle(answer, tree=True)),
        ],
        vocab_size=V,
    )
    outputs = run(make_engine(drafter=hybrid, num_draft_tokens=budget, max_num_batched_tokens=96), prompts, params)
    assert [[c.token_ids for c in o.outputs] for o in outputs] == [[c.token_ids for c in o.outputs] for o in plain]
    metrics = outputs[0].metrics
    assert metrics.num_accepted_tokens > 0
    assert metrics.num_draft_tokens <= sum(metrics.num_draft_tokens_per_drafter.values())
    assert max(metrics.num_accepted_tokens_per_drafter.values()) <= metrics.num_accepted_tokens


def test_credit_goes_to_those_who_proposed() -> None:
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    answer = [*PROMPT, *run(make_engine(), [PROMPT], params)[0].token_ids]
    wrong = Scripted("wrong", oracle(answer, wrong_at=frozenset(range(len(answer)))))
    hybrid = HybridDrafter([wrong, Scripted("right", oracle(answer))], vocab_size=V)
    metrics = run(make_engine(drafter=hybrid), [PROMPT], params)[0].metrics
    assert metrics.num_accepted_tokens_per_drafter == {"wrong": 0, "right": metrics.num_accepted_tokens}
    assert sum(metrics.num_draft_tokens_per_drafter.values()) == metrics.num_draft_tokens


def observe(hybrid: HybridDrafter, draft: Draft | None, emitted: Sequence[int]) -> None:
    """The verdict that coupled verification would give, were these the target's tokens."""
    path: list[int] = []
    for node, name in enumerate(paths(draft) if draft else []):
        if list(name) == list(emitted[: len(name)]) and len(name) < len(emitted):
            path.append(node)
    verdict = Verdict(tuple(path), emitted[len(path)], "recovered")
    hybrid.observe(Observation([view()], [draft], [verdict], {}, np.array([0, 1]), [None]))


def test_a_drafter_that_earns_more_gets_more_and_can_win_it_back() -> None:
    """Budgets of four nodes; the text is 5 6 7 8 9 at first, then 1 2 3 4 5; each drafter knows one of them."""
    texts = {"a": [5, 6, 7, 8, 9], "b": [1, 2, 3, 4, 5]}
    hybrid = HybridDrafter([Scripted(name, lambda _, t=text: t) for name, text in texts.items()], vocab_size=V)

    def nodes_of_a_after(emitted: Sequence[int], steps: int) -> int:
        for _ in range(steps):
            observe(hybrid, hybrid.propose([view()], [4])[0], emitted)
        [draft] = hybrid.propose([view()], [4])
        assert draft is not None
        assert draft.proposers is not None
        return sum("a" in names for names in draft.proposers)

    assert nodes_of_a_after([], 0) == 2
    assert nodes_of_a_after(texts["a"], 20) == 4
    assert nodes_of_a_after(texts["b"], 60) == 0
    assert nodes_of_a_after(texts["a"], 60) == 4


def test_drafters_that_are_never_right_are_asked_on_but_draft_nothing_until_they_are() -> None:
    hybrid = HybridDrafter([Scripted("a", lambda _: [5, 6])], vocab_size=V)
    for _ in range(60):
        observe(hybrid, hybrid.propose([view()], [4])[0], [1, 2])
    assert hybrid.propose([view()], [4]) == [None]
    for _ in range(60):
        observe(hybrid, hybrid.propose([view()], [4])[0], [5, 6, 7])
    [draft] = hybrid.propose([view()], [4])
    assert draft is not None
    assert paths(draft) == [(5,), (5, 6)]


def test_claims_are_corrected_by_depth() -> None:
    record = TrackRecord()
    draft = tree([5, 6, 7, 8], [-1, -1, 0, 2], [0.6, 0.4, 0.9, 0.8])
    assert record.chances(draft) == [0.6, 0.4, 0.9, 0.8]
    for _ in range(400):
        record.note(draft, [5, 9])  # the first is always right, its child never; what is behind it is not known
    first, second, third, fourth = record.chances(draft)
    assert (first, second) == (pytest.approx(0.6, abs=0.01), pytest.approx(0.4, abs=0.01))  # promised 1, had 1
    assert third < 0.1
    assert fourth == 0.8


def test_members_are_told_of_the_merged_draft_with_what_they_wanted() -> None:
    one = Scripted("one", lambda _: [5], num_successors=2, hidden_layers=(1, "final"))
    two = Scripted("two", lambda _: [5, 6], num_successors=3, hidden_layers=("final", 3))
    three = Scripted("three", lambda _: None)
    hybrid = HybridDrafter([one, two, three], vocab_size=V)
    assert (hybrid.num_successors, hybrid.hidden_layers) == (3, (1, "final", 3))
    views = [view(), view(request_id="s")]
    drafts = hybrid.propose(views, [4, 4])
    verdicts = [Verdict((0,), 3, "recovered"), Verdict((), 4, "recovered")]
    starts, rows = np.array([0, 3, 4]), np.arange(9).reshape(3, 3)
    hybrid.observe(Observation(views, [drafts[0], None], verdicts, {1: 0}, starts, [rows, None]))
    for member, wanted in ((one, 2), (two, 3)):
        [(told, *rest, successors)] = member.told
        assert told[0] is drafts[0]
        assert rest == [verdicts, {1: 0}, starts]
        assert successors[0].tolist() == rows[:, :wanted].tolist()
        assert successors[1] is None
    assert three.told[0][-1] == [None, None]
    hybrid.release("r")
    assert one.released == two.released == ["r"]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft.chain([5], source="", law=DraftLaw(np.eye(V)[[5]])), "'bad' gave a law"),
        (Draft.chain([V], source=""), "'bad' proposed a token outside"),
        (tree([5, 6], [1, -1]), "'bad' proposed a node before its parent"),
    ],
)
def test_an_unusable_draft_names_its_drafter(draft: Draft, message: str) -> None:
    hybrid = HybridDrafter([Scripted("good", lambda _: [5]), Scripted("bad", lambda _: draft)], vocab_size=V)
    with pytest.raises(DraftMismatchError, match=message):
        hybrid.propose([view()], [4])


def test_a_list_of_the_wrong_length_names_its_drafter() -> None:
    bad = Scripted("bad", lambda _: [5])
    bad.propose = lambda views, budgets: []  # type: ignore[method-assign]
    with pytest.raises(DraftMismatchError, match="'bad' must return a list of 1 drafts"):
        HybridDrafter([bad], vocab_size=V).propose([view()], [4])


def test_closing_reaches_every_drafter_also_when_one_fails() -> None:
    closed: list[str] = []

    class Closing(Scripted):
        def close(self) -> None:
            closed.append(self.name)
            if self.name == "full":
                raise ConfigError("no room")

    names = ["first", "full", "last"]
    with pytest.raises(ConfigError, match="no room"):
        HybridDrafter([Closing(name, lambda _: [5]) for name in names], vocab_size=V).close()
    assert sorted(closed) == sorted(names)


class LastToken(ScriptedDrafter):
    """A plug-in that guesses a repetition."""

    def __init__(self) -> None:
        super().__init__(lambda view: [int(view.token_ids[-1])] * 3)


@pytest.mark.parametrize("method", [f"ngram+{__name__}:LastToken", "suffix+recycle"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_real_engine_gives_the_ids_of_plain_decoding(tiny_llama, temperature: float, method: str) -> None:
    config = EngineConfig(num_threads=1, cache=CacheConfig(kv_cache_memory=4 << 20))
    llm = LLM(str(tiny_llama), config=config, speculation=method)
    prompts = ["ab ab ab ab", "x y z x y"]
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)
    plain = SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True, speculation=False)
    outputs = llm.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in llm.generate(prompts, plain)]
    assert len(outputs[0].metrics.num_draft_tokens_per_drafter) == 2


class Frugal(FixedLength):
    """Asks each drafter for one node less than the one before it, and writes down what it is told."""

    def __init__(self) -> None:
        super().__init__(8)
        self.seen: list[tuple[str, list[int]]] = []
        self.told: list[tuple[str, list[int]]] = []

    def budgets(self, drafter, views, limits, drafts):
        self.seen.append((drafter.name, [len(own) for own in drafts]))
        return [limit - len(own) for limit, own in zip(limits, drafts, strict=True)]

    def drafted(self, drafter, views, drafts, *, seconds):
        assert seconds >= 0
        assert len(drafts) == len(views)
        self.told.append((drafter.name, [0 if draft is None else len(draft) for draft in drafts]))


def test_members_are_asked_in_order_for_what_the_controller_says() -> None:
    hybrid = HybridDrafter([Scripted(name, lambda _: [5, 6, 7]) for name in "abc"], vocab_size=V)
    controller = Frugal()
    hybrid.consult(controller)
    [draft] = hybrid.propose([view()], [2])
    assert controller.seen == [("a", [0]), ("b", [1]), ("c", [2])]
    assert controller.told == [("a", [2]), ("b", [1])]  # nothing was asked of c
    assert draft is not None
    assert draft.proposers == (("a", "b"), ("a",))


def test_nodes_that_could_not_pay_in_a_step_are_left_out() -> None:
    hybrid = HybridDrafter(
        [Scripted("a", lambda _: tree([5, 6, 7, 8], [-1, 0, 1, -1], [0.6, 0.6, 0.6, 0.3]))], vocab_size=V, selects=False
    )
    controller = FixedLength(8)
    hybrid.consult(controller)
    for least, kept in ((0.0, [5, 6, 7, 8]), (0.25, [5, 6, 8]), (0.35, [5, 6]), (0.59, [5])):
        controller.least_reach = least
        [draft] = hybrid.propose([view()], [8])
        assert draft is not None
        assert draft.token_ids.tolist() == kept
    controller.least_reach = 0.61
    assert hybrid.propose([view()], [8]) == [None]


def test_a_wrong_draft_under_a_controller_names_its_drafter(monkeypatch) -> None:
    wrong = Scripted("b", lambda _: [5])
    monkeypatch.setattr(wrong, "propose", lambda views, budgets: ["draft"])
    hybrid = HybridDrafter([Scripted("a", lambda _: [5]), wrong], vocab_size=V)
    hybrid.consult(Frugal())
    with pytest.raises(DraftMismatchError, match="'b'"):
        hybrid.propose([view()], [4])


def test_a_member_that_fails_at_a_release_keeps_no_other_from_it():
    class Failing(Scripted):
        def release(self, request_id: str) -> None:
            super().release(request_id)
            raise RuntimeError("no")

    members = [Scripted("a", lambda _: None), Failing("b", lambda _: None), Scripted("c", lambda _: None)]
    with pytest.raises(RuntimeError, match="no"):
        HybridDrafter(members, vocab_size=V).release("r")
    assert [member.released for member in members] == 3 * [["r"]]
