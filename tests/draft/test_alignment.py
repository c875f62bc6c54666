"""Alignment: copies, edits, renames and nonsense, against what the output really goes on with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.alignment import Alignment

FAR = 64


def align(prediction: list[int], output: list[int]) -> Alignment:
    alignment = Alignment(np.array(prediction, dtype=np.int32))
    alignment.extend(output)
    return alignment


def expected(prediction: list[int], output: list[int]) -> list[int]:
    return align(prediction, output).expected(FAR)


def misses(prediction: list[int], output: list[int]) -> list[int]:
    """Indices of the output's tokens that were not the one expected, the first excepted."""
    alignment = align(prediction, output[:1])
    wrong = []
    for index, token in enumerate(output[1:], 1):
        if alignment.expected(1) != [token]:
            wrong.append(index)
        alignment.extend([token])
    return wrong


@settings(derandomize=True)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.data())
def test_a_copy_is_expected_to_its_end(prediction, data):
    known = data.draw(st.integers(1, len(prediction)))
    assert expected(prediction, prediction[:known]) == prediction[known:]
    assert align(prediction, prediction[:known]).evidence == 1 + known


@settings(derandomize=True)
@given(st.lists(st.integers(0, 4), max_size=40), st.lists(st.integers(0, 5), max_size=60), st.data())
def test_what_is_expected_depends_on_the_texts_alone(prediction, output, data):
    whole = align(prediction, output)
    pieces = align(prediction, [])
    at = 0
    while at < len(output):
        size = data.draw(st.integers(1, 9))
        pieces.extend(output[at : at + size])
        at += size
    assert whole.num_tokens == pieces.num_tokens == len(output)
    assert (whole.evidence, whole.expected(FAR)) == (pieces.evidence, pieces.expected(FAR))
    assert set(whole.expected(FAR)) <= {*prediction, *output}
    for count in (1, 3):
        assert whole.expected(count) == whole.expected(FAR)[:count]


@settings(derandomize=True)
@given(st.lists(st.integers(0, 9), max_size=60), st.integers(0, 20))
def test_eight_tokens_of_the_prediction_are_enough_to_find_the_place_again(nonsense, start):
    prediction = list(range(10, 60))
    copied = prediction[start : start + 8]
    assert expected(prediction, [*nonsense, *copied]) == prediction[start + 8 :]


BEFORE = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("output", "rest"),
    [
        ([1, 2, 3, 99, 5], [6, 7]),  # replaced by one
        ([1, 2, 3, 98, 99, 5], [6, 7]),  # by two
        ([1, 2, 3, 99, 7], [8, 9]),  # three by one
        ([1, 2, 3, 99, 98, 97, 4], [5, 6]),  # inserted
        ([1, 2, 3, 6], [7, 8]),  # dropped
        ([99, 98, 1], [2, 3]),  # something comes first
        ([1, 2, 3, 99], []),  # in the middle of an edit
        ([1, 2, 3, 99, 4, 4], []),  # found a place that was none
        ([6, 7, 8, 9, 1, 2], []),  # back at the beginning takes three
        ([6, 7, 8, 9, 1, 2, 3], [4, 5]),
        (BEFORE, []),  # the end
        ([*BEFORE, 5, 6, 7], [8, 9]),  # and a second copy
    ],
)
def test_the_place_after_an_edit(output, rest):
    assert expected(BEFORE, output)[:2] == rest


def test_far_ahead_one_token_is_not_enough():
    prediction = list(range(100))
    assert expected(prediction, [0, 1, 50]) == []
    assert expected(prediction, [0, 1, 50, 51])[:2] == [52, 53]


def test_a_renamed_variable_is_a_miss_once():
    prediction = [1, 50, 2, 3, 50, 4, 5, 6, 50, 50, 7, 8]
    output = [1, 60, 61, 2, 3, 60, 61, 4, 5, 6, 60, 61, 60, 61, 7, 8]
    assert misses(prediction, output) == [1, 2, 3]  # the new name, and the token at which the place is found


def test_a_token_that_is_dropped_everywhere_is_a_miss_once():
    prediction = [50, 1, 50, 2, 50, 3, 50, 4]
    assert misses(prediction, [50, 1, 2, 3, 4]) == [2]


def test_a_variable_may_be_renamed_twice_in_a_row():
    assert misses([1, 50, 2, 50, 3, 50, 4], [1, 60, 2, 60, 3, 60, 4]) == [1, 2]


def test_a_replacement_that_is_not_made_again_is_forgotten():
    assert misses([1, 50, 2, 3, 50, 4, 50, 5], [1, 60, 2, 3, 50, 4, 50, 5]) == [1, 2, 4]


def test_of_two_replacements_the_longer_one_counts():
    prediction = [1, 50, 51, 2, 3, 50, 4, 5, 50, 51, 6, 50, 7]
    output = [1, 70, 2, 3, 60, 4, 5, 70, 6, 60, 7]
    assert misses(prediction, output) == [1, 2, 4, 5]


def test_places_that_turn_out_wrong_make_the_next_one_harder_to_find():
    prediction = list(range(200))
    output = [0]
    for needed in (1, 2, 3, 4, 5):
        start = 20 * needed - 18  # the first one is near, the others take one token more
        copied = list(range(start, start + needed + (needed > 1)))
        assert needed == 1 or not expected(prediction, [*output, *copied[:-1]])
        assert expected(prediction, [*output, *copied])[0] == copied[-1] + 1
        output += [*copied, 99]
    assert not expected(prediction, [*output, 3, 4, 5, 6, 7])
    assert expected(prediction, [*output, 3, 4, 5, 6, 7, 8, 9, 10, 11])[0] == 12  # confirmed by the ninth
    assert expected(prediction, [*output, 3, 4, 5, 6, 7, 8, 9, 10, 11, 99, 13])[0] == 14  # and near is near again


@pytest.mark.parametrize("output", [[], [1], [1, 2, 3]])
def test_an_empty_prediction_expects_nothing(output):
    assert expected([], output) == []
