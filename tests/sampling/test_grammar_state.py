"""What a grammar makes of drafts, against each node's own path gone anew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.params import Grammar, SamplingParams
from paceline.sampling.grammar import GrammarCompiler
from paceline.sampling.grammar_state import GrammarState
from paceline.testing import CharTokenizer
from paceline.types import Draft

TOKENIZER = CharTokenizer("abc.")
V = TOKENIZER.vocab_size
COMPILER = GrammarCompiler(TOKENIZER, vocab_size=V)
GRAMMARS = [
    Grammar.regex("(ab|ba){1,3}[.]"),
    Grammar.regex("[abc]*"),
    Grammar.lark('start: "a" start "b" | "c"'),
    Grammar.regex("c+[.]", after="ab"),
    Grammar.choice(["abc", "ab", "b."], after="aa"),
]


def state_after(grammar: Grammar, params: SamplingParams, token_ids: list[int]) -> GrammarState:
    state = GrammarState(COMPILER.compile(grammar), params, eos_ids=TOKENIZER.eos_ids, vocab_size=V)
    state.append(token_ids)
    return state


def root_mask(state: GrammarState) -> set[int]:
    _, masks = state.constrain(None, limit=0)
    return set(np.flatnonzero(np.unpackbits(masks[0], bitorder="little", count=V)).tolist())


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    size = draw(st.integers(1, 12))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    token_ids = draw(st.lists(st.integers(1, V - 1), min_size=size, max_size=size))
    return Draft(np.array(token_ids, np.int32), np.array(parents, np.int32), source="test")


all_params = st.builds(
    SamplingParams,
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.sampled_from([(), (4,)]),
    banned_token_ids=st.sampled_from([(), (), (3,)]),
    allowed_token_ids=st.sampled_from([None, None, (1, 2, 3, 5)]),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(GRAMMARS), all_params, st.lists(st.integers(2, V - 1), max_size=5), trees())
def test_kept_are_the_nodes_that_the_target_can_sample_and_go_on_from(grammar, params, wishes, draft):
    known: list[int] = []
    for wish in wishes:
        state = state_after(grammar, params, known)
        if state.status == "open" and wish in root_mask(state) and wish not in params.stop_token_ids:
            known.append(wish)
    state = state_after(grammar, params, known)
    if state.status != "open":
        return
    kept, masks = state.constrain(draft, limit=0)
    expected, paths = [], {-1: known}
    token_ids, parents = draft.token_ids.tolist(), draft.parents.tolist()
    for node, (token_id, parent) in enumerate(zip(token_ids, parents, strict=True)):
        if parent not in paths or token_id in (*TOKENIZER.eos_ids, *params.stop_token_ids):
            continue
        path = [*paths[parent], token_id]
        if token_id in root_mask(state_after(grammar, params, paths[parent])):
            after = state_after(grammar, params, path)
            if after.status == "open":
                paths[node] = path
                expected.append((node, root_mask(after)))
    assert len(masks) == 1 + len(expected)
    assert root_mask(state) == root_mask(state_after(grammar, params, known))  # the walk left no trace
    if not expected:
        assert kept is None
        return
    assert kept is not None
    assert kept.token_ids.tolist() == [token_ids[node] for node, _ in expected]
    place = {-1: -1, **{node: index for index, (node, _) in enumerate(expected)}}
    assert kept.parents.tolist() == [place[parents[node]] for node, _ in expected]
    for row, (_, tokens) in zip(masks[1:], expected, strict=True):
        assert set(np.flatnonzero(np.unpackbits(row, bitorder="little", count=V)).tolist()) == tokens


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text("ab.", max_size=8), st.sampled_from(["a", "ab", "aab", "aba", "b.b"]))
def test_the_grammar_begins_where_the_marker_ends(text, marker):
    params = SamplingParams()
    state = state_after(Grammar.regex("c{2}", after=marker), params, TOKENIZER.encode(text, add_special_tokens=False))
    free = set(range(V))
    c, end = TOKENIZER.encode("c", add_special_tokens=False)[0], text.find(marker)
    if end < 0:
        assert root_mask(state) == free
    elif end + len(marker) == len(text):
        assert root_mask(state) == {c}
    else:
        assert state.status == "stuck"  # "a", "b" and "." are not in the grammar


def test_a_token_may_end_the_marker_and_begin_the_grammar():
    from piece_tokenizer import PieceTokenizer

    tokenizer = PieceTokenizer([b"a", b"b", b"c", b"ab", b"bc", b"bcc", b"bca", b"xabc", b"x"])
    compiled = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size).compile(Grammar.regex("c{2}", after="ab"))

    def fresh(*pieces: bytes) -> GrammarState:
        state = GrammarState(compiled, SamplingParams(), eos_ids=tokenizer.eos_ids, vocab_size=tokenizer.vocab_size)
        state.append([tokenizer.id_of(piece) for piece in pieces])
        return state

    def pieces(state: GrammarState) -> set[str]:
        _, masks = state.constrain(None, limit=0)
        bits = np.unpackbits(masks[0], bitorder="little", count=tokenizer.vocab_size)
        return {tokenizer.token_text(i) for i in np.flatnonzero(bits).tolist()}

    everything = {"<eos>", "a", "b", "c", "ab", "bc", "bcc", "bca", "xabc", "x"}
    assert pieces(fresh()) == everything
    assert pieces(fresh(b"a")) == everything - {"bca"}  # "a" is not in the grammar
    assert pieces(fresh(b"a", b"bc")) == {"c"}
    assert pieces(fresh(b"x", b"xabc")) == {"c"}
    assert fresh(b"a", b"bcc").status == "complete"
    draft = Draft.chain([tokenizer.id_of(p) for p in (b"a", b"bc", b"c", b"c")], source="test")
    kept, masks = fresh(b"x").constrain(draft, limit=0)
    assert kept is not None
    assert kept.token_ids.tolist() == draft.token_ids.tolist()[:2]  # the third ends the text, nothing follows
    assert len(masks) == 3


def test_a_draft_beyond_the_limits_of_parsing_leaves_no_trace(monkeypatch: pytest.MonkeyPatch):
    grammar, params = Grammar.regex("[abc]*"), SamplingParams()
    known = TOKENIZER.encode("ab", add_special_tokens=False)
    state = state_after(grammar, params, known)
    path = state._path
    monkeypatch.setattr(path._matcher.__class__, "is_error", lambda matcher: matcher is path._matcher, raising=False)
    draft, masks = state.constrain(Draft.chain(known, source="test"), limit=0)
    assert draft is None
    assert masks.shape == (1, 1)
    assert state._path is not path
    assert root_mask(state) == root_mask(state_after(grammar, params, known))


def test_forced_tokens_give_way_to_a_draft_that_holds_them():
    state = state_after(Grammar.regex("abc[abc]*"), SamplingParams(), [])
    ids = TOKENIZER.encode("abca", add_special_tokens=False)
    for draft, source in ((ids, "test"), (ids[:2], "grammar"), (ids[1:], "grammar")):
        kept, _ = state.constrain(Draft.chain(draft, source="test"), limit=8)
        assert kept is not None
        assert kept.source == source
    kept, masks = state.constrain(None, limit=2)
    assert kept is not None
    assert (kept.token_ids.tolist(), len(masks)) == (ids[:2], 3)
