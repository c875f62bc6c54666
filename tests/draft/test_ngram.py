"""NgramDrafter against a search written as its definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.ngram import NgramDrafter
from paceline.params import SamplingParams
from paceline.types import RequestView


def view(token_ids: list[int] | np.ndarray) -> RequestView:
    ids = np.asarray(token_ids, dtype=np.int32)
    return RequestView("r", ids, len(ids), SamplingParams(), seed=0, stream=0, attempt=0)


def propose(token_ids: list[int], budget: int, **options: int) -> list[int] | None:
    (draft,) = NgramDrafter(**options).propose([view(token_ids)], [budget])
    if draft is None:
        return None
    assert draft.is_chain
    assert draft.source == "ngram"
    assert draft.token_ids.dtype == np.int32
    return draft.token_ids.tolist()


def definition(ids: list[int], budget: int, max_ngram: int, min_ngram: int) -> list[int] | None:
    for n in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(ids) - n - 1, -1, -1):
            if ids[start : start + n] == ids[len(ids) - n :]:
                text = list(ids)
                for i in range(budget):
                    text.append(text[start + n + i])
                return text[len(ids) :]
    return None


@settings(derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 3), st.integers(0, 3))
def test_equals_the_definition(ids, budget, min_ngram, more):
    max_ngram = min_ngram + more
    expected = definition(ids, budget, max_ngram, min_ngram)
    assert propose(ids, budget, max_ngram=max_ngram, min_ngram=min_ngram) == expected


def test_longest_suffix_wins_then_the_latest():
    assert propose([1, 2, 3, 7, 2, 3, 8, 2, 3, 9, 1, 2, 3], 2) == [7, 2]
    assert propose([2, 3, 7, 2, 3, 8, 9, 2, 3], 2) == [8, 9]


def test_suffix_does_not_match_itself():
    assert propose([1, 2, 3, 4], 3) is None
    assert propose([5], 3) is None


def test_repetition_is_extended_beyond_the_end():
    assert propose([9, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_draft_does_not_alias_the_text():
    ids = np.array([1, 2, 3, 1, 2], dtype=np.int32)
    (draft,) = NgramDrafter().propose([view(ids)], [1])
    ids[2] = 7
    assert draft is not None
    assert draft.token_ids.tolist() == [3]
