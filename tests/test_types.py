"""Drafts as trees, and sums of metrics."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.types import Draft, SpeculationMetrics


def test_chains():
    draft = Draft.chain([5, 6, 7], source="test")
    assert (draft.token_ids.tolist(), draft.parents.tolist()) == ([5, 6, 7], [-1, 0, 1])
    assert (draft.token_ids.dtype, draft.parents.dtype) == (np.int32, np.int32)
    assert (len(draft), draft.source, draft.law) == (3, "test", None)
    assert draft.is_chain
    assert Draft.chain(np.array([], np.int64), source="test").is_chain
    for parents in ([-1, -1], [-1, 0, 0], [0, 1]):
        tree = Draft(token_ids=np.zeros(len(parents), np.int32), parents=np.array(parents, np.int32))
        assert not tree.is_chain


def test_depths_and_ancestors():
    tree = Draft(token_ids=np.array([5, 6, 7, 8], np.int32), parents=np.array([-1, -1, 1, 2], np.int32))
    assert tree.depths().tolist() == [1, 1, 2, 3]
    assert tree.depths().dtype == np.int32
    assert tree.ancestors().astype(int).tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    empty = Draft.chain([], source="test")
    assert empty.depths().shape == (0,)
    assert empty.ancestors().shape == (0, 0)


def test_sums_of_metrics():
    one = SpeculationMetrics(2, 10, 5, (2, 2, 1), 4, {"a": 10}, {"a": 5})
    other = SpeculationMetrics(1, 1, 1, (1,), 6, {"a": 1, "b": 1}, {"a": 0, "b": 1})
    total = one + other
    assert total == other + one == SpeculationMetrics(3, 11, 6, (3, 2, 1), 10, {"a": 11, "b": 1}, {"a": 5, "b": 1})
    assert sum([one, other], SpeculationMetrics()) == total
    assert total.acceptance_rate == pytest.approx(6 / 11)
    assert total.acceptance_length == pytest.approx(1.6)
    predicted = SpeculationMetrics(2, 10, 5, (2,), 4, {"prediction": 8, "b": 2}, {"prediction": 5, "b": 0})
    assert (predicted.accepted_prediction_tokens, predicted.rejected_prediction_tokens) == (5, 3)
    assert (one.accepted_prediction_tokens, one.rejected_prediction_tokens) == (0, 0)
    assert (SpeculationMetrics().acceptance_rate, SpeculationMetrics().acceptance_length) == (0.0, 1.0)


def test_nothing_is_drafted_below_an_end():
    draft = Draft(
        token_ids=np.array([5, 9, 6, 7, 9, 8], dtype=np.int32),
        parents=np.array([-1, -1, 0, 1, 2, 4], dtype=np.int32),
        confidence=np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4]),
        source="a+b",
        proposers=(("a",), ("b",), ("a", "b"), ("b",), ("a",), ("a",)),
    )
    cut = draft.cut_after(frozenset({9}))
    assert cut.token_ids.tolist() == [5, 9, 6, 9]
    assert cut.parents.tolist() == [-1, -1, 0, 2]
    assert cut.confidence is not None
    assert cut.confidence.tolist() == [0.9, 0.8, 0.7, 0.5]
    assert cut.proposers == (("a",), ("b",), ("a", "b"), ("a",))
    assert draft.cut_after(frozenset({1})) is draft


def test_only_some_nodes_of_a_draft():
    draft = Draft(np.array([5, 6, 7, 8], np.int32), np.array([-1, 0, 0, 2], np.int32), source="a")
    some = draft.only([0, 2, 3])
    assert (some.token_ids.tolist(), some.parents.tolist(), some.source) == ([5, 7, 8], [-1, 0, 1], "a")
