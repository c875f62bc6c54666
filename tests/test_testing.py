"""The doubles themselves: ToyModel must be right in any packing and must notice each mistake."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.errors import PromptError
from paceline.params import SamplingParams
from paceline.testing import CharTokenizer, ScriptedDrafter, ToyModel
from paceline.types import Draft, DraftLaw, ForwardBatch, RequestView


def batch(
    token_ids: list[int],
    *,
    table: list[int],
    context: int = 0,
    rows: list[int] | None = None,
    positions: list[int] | None = None,
    ancestors: np.ndarray | None = None,
    block_size: int = 4,
) -> ForwardBatch:
    """A pass of one request."""
    count = len(token_ids)
    keys = np.arange(context, context + count)
    table_ids = np.array(table, dtype=np.int32)
    return ForwardBatch(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=np.array(keys if positions is None else positions, dtype=np.int32),
        slots=(table_ids[keys // block_size] * block_size + keys % block_size).astype(np.int64),
        query_starts=np.array([0, count], dtype=np.int32),
        context_lengths=np.array([context], dtype=np.int32),
        block_tables=[table_ids],
        ancestors=[ancestors],
        logit_rows=np.array(range(count) if rows is None else rows, dtype=np.int32),
    )


def toy(**options) -> ToyModel:
    return ToyModel(**{"num_blocks": 8, "block_size": 4, **options})


def logits(model: ToyModel, pass_: ForwardBatch) -> np.ndarray:
    out = model.forward(pass_).logits
    assert out is not None
    assert out.dtype == np.float32
    return out


IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def test_chunks_and_tables_do_not_change_a_bit():
    whole = logits(toy(), batch(IDS, table=[0, 1]))
    model = toy()
    parts = [
        logits(model, batch(IDS[:3], table=[6], context=0)),
        logits(model, batch(IDS[3:4], table=[6], context=3)),
        logits(model, batch(IDS[4:], table=[6, 2], context=4)),
    ]
    assert np.array_equal(whole, np.concatenate(parts))
    assert model.num_passes == 3
    assert model.num_tokens == 8


def test_requests_of_a_pass_do_not_touch_each_other():
    one, two = batch(IDS[:4], table=[0]), batch(IDS[4:], table=[3], rows=[1, 3])
    packed = ForwardBatch(
        token_ids=np.concatenate([one.token_ids, two.token_ids]),
        positions=np.concatenate([one.positions, two.positions]),
        slots=np.concatenate([one.slots, two.slots]),
        query_starts=np.array([0, 4, 8], dtype=np.int32),
        context_lengths=np.array([0, 0], dtype=np.int32),
        block_tables=one.block_tables + two.block_tables,
        ancestors=[None, None],
        logit_rows=np.array([7, 0, 5, 7], dtype=np.int32),
    )
    alone = logits(toy(), one), logits(toy(), two)
    expected = np.stack([alone[1][1], alone[0][0], alone[1][0], alone[1][1]])
    assert np.array_equal(logits(toy(), packed), expected)


def test_rows_depend_on_all_tokens_or_on_the_last_ones_of_the_order():
    changed = [7, *IDS[1:]]
    a, b = logits(toy(), batch(IDS, table=[0, 1])), logits(toy(), batch(changed, table=[0, 1]))
    assert not any(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    a, b = logits(toy(order=2), batch(IDS, table=[0, 1])), logits(toy(order=2), batch(changed, table=[0, 1]))
    assert [np.array_equal(x, y) for x, y in zip(a, b, strict=True)] == [False, False] + [True] * 6


def test_drift_and_seed_make_other_models():
    rows = [logits(m, batch(IDS, table=[0, 1])) for m in (toy(), toy(seed=1), toy(drift=0.5))]
    assert not np.array_equal(rows[0], rows[1])
    assert 0.4 < np.std(rows[0] - rows[2]) < 0.6


TREE = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]], dtype=bool)


def tree_batch(**changes) -> ForwardBatch:
    """After IDS[:3]: nodes 7 and 8, each with a child 9."""
    options = {"table": [0, 1], "context": 3, "positions": [3, 3, 4, 4], "ancestors": TREE, **changes}
    return batch([7, 8, 9, 9], **options)


def test_tree_rows_equal_the_rows_of_their_paths_and_move_keeps_a_path():
    model = toy()
    logits(model, batch(IDS[:3], table=[0, 1]))
    tree = logits(model, tree_batch())
    for path, first in ((7, [0, 2]), (8, [1, 3])):
        assert np.array_equal(tree[first], logits(toy(), batch([*IDS[:3], path, 9, 0], table=[4, 5]))[3:5])
    model.move(np.array([4, 6]), np.array([3, 4]))  # the second path
    after = logits(model, batch([0], table=[0, 1], context=5))
    assert np.array_equal(after, logits(toy(), batch([*IDS[:3], 8, 9, 0], table=[0, 1]))[5:])


def test_path_that_was_not_moved_is_noticed():
    model = toy()
    logits(model, batch(IDS[:3], table=[0, 1]))
    logits(model, tree_batch())
    with pytest.raises(AssertionError, match="positions"):
        model.forward(batch([0], table=[0, 1], context=5))


def test_wrong_node_of_the_right_depth_is_noticed():
    model = toy()
    logits(model, batch(IDS[:3], table=[0, 1]))
    logits(model, tree_batch())
    model.move(np.array([4, 5]), np.array([3, 4]))  # 8 from the second path, 9 from the first
    with pytest.raises(AssertionError, match="computed after other tokens"):
        model.forward(batch([0], table=[0, 1], context=5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": np.array([3, 3, 4, 5], dtype=np.int32)}, "sees positions"),
        ({"ancestors": [np.tril(np.ones((4, 4), dtype=bool))]}, "sees positions"),
        ({"ancestors": [TREE & ~np.eye(4, dtype=bool)]}, "does not see itself"),
        ({"ancestors": [TREE[[0, 1, 3, 2]] | np.eye(4, dtype=bool)]}, "not the last one"),
        ({"slots": np.array([3, 4, 5, 5])}, "share a slot"),
        ({"slots": np.array([3, 4, 5, 7])}, "not the one in its table"),
        ({"token_ids": np.array([7, 8, 9, 32], dtype=np.int32)}, "outside"),
        ({"context_lengths": np.array([2], dtype=np.int32)}, "not the one in its table"),
        ({"hidden_layers": (3,)}, "hidden"),
    ],
)
def test_each_mistake_of_a_pass_is_noticed(change, message):
    model = toy()
    logits(model, batch(IDS[:3], table=[0, 1]))
    with pytest.raises(AssertionError, match=message):
        model.forward(replace(tree_batch(), **change))


def test_keys_of_another_text_are_noticed():
    model = toy()
    logits(model, batch(IDS, table=[0, 1]))
    logits(model, batch([8], table=[0], context=0))  # token 0 is written anew, the rest was computed after the old one
    with pytest.raises(AssertionError, match="computed after other tokens"):
        model.forward(batch([1], table=[0, 1], context=7))


def test_tokens_beyond_the_context_are_noticed():
    with pytest.raises(AssertionError, match="max_model_len"):
        toy(max_model_len=7).forward(batch(IDS, table=[0, 1]))


def view() -> RequestView:
    return RequestView("r", np.array([1], dtype=np.int32), 1, SamplingParams(), seed=0, stream=0, attempt=0)


def test_scripted_drafts_are_cut_to_their_budget():
    chain = ScriptedDrafter(lambda view: [4, 5, 6])
    (draft,) = chain.propose([view()], [2])
    assert draft is not None
    assert draft.token_ids.tolist() == [4, 5]
    assert ScriptedDrafter(lambda view: None).propose([view()], [2]) == [None]
    assert ScriptedDrafter(lambda view: []).propose([view()], [2]) == [None]
    full = Draft(
        np.array([4, 5, 6], dtype=np.int32),
        np.array([-1, -1, 0], dtype=np.int32),
        law=DraftLaw(np.ones((3, 1))),
        confidence=np.ones(3),
        source="mine",
    )
    (draft,) = ScriptedDrafter(lambda view: full).propose([view()], [2])
    assert draft is not None
    assert draft.law is not None
    assert draft.confidence is not None
    assert (len(draft), len(draft.parents), len(draft.law.probs), len(draft.confidence)) == (2, 2, 2, 2)
    assert draft.source == "mine"


def test_char_tokenizer_round_trips():
    tokenizer = CharTokenizer()
    ids = tokenizer.encode("Hello, world\n")
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.encode("Hello, world\n", add_special_tokens=False) == ids[1:]
    assert tokenizer.decode([*ids, 1]) == "Hello, world\n"
    assert tokenizer.decode([*ids, 1], skip_special_tokens=False) == "<bos>Hello, world\n<eos>"
    assert tokenizer.vocab_size == 102
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "user: Hi\nassistant: "
    assert CharTokenizer("ab").fingerprint != tokenizer.fingerprint
    with pytest.raises(PromptError, match="'é'"):
        tokenizer.encode("é")


def test_keys_of_a_pass_over_some_layers_are_good_for_such_passes_only():
    model = toy(skip_drift=1.0)
    whole = logits(model, batch(IDS[:5], table=[0, 1]))
    skipping = logits(model, replace(batch(IDS[5:], table=[0, 1], context=5), layers=(0,)))
    rest = logits(toy(), batch(IDS, table=[0, 1]))
    assert np.array_equal(whole, rest[:5])
    assert not np.isclose(skipping, rest[5:]).all(axis=1).any()
    with pytest.raises(AssertionError, match="sees keys that lack some"):
        model.forward(batch([7], table=[0, 1, 2], context=8))
    assert np.array_equal(logits(model, batch(IDS[5:], table=[0, 1], context=5)), rest[5:])
    model.forward(batch([7], table=[0, 1, 2], context=8))
