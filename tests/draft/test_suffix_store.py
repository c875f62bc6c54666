"""SuffixStore: memory stays flat, nothing is stored twice."""

from __future__ import annotations

import random
from array import array

import pytest

from paceline.draft.automaton import NO_STATE, ROOT
from paceline.draft.suffix_store import SuffixStore
from paceline.errors import ConfigError


def ids(*tokens: int) -> array[int]:
    return array("i", tokens)


def occurrences(store: SuffixStore, *string: int) -> int:
    total = 0
    for automaton in store.automata:
        state = ROOT
        for token in string:
            state = automaton.target(state, token)
            if state == NO_STATE:
                break
        else:
            total += automaton.count(state)
    return total


def test_memory_is_flat_over_thousands_of_requests():
    rng = random.Random(5)
    store = SuffixStore(max_tokens=1000, max_length=8)
    for number in range(2000):
        store.add(f"{number}/0", ids(*rng.choices(range(40), k=rng.randrange(1, 60))))
        assert store.num_tokens <= 1000
        assert store.num_states <= 2 * 1000 + 2
        if number % 200 == 0:
            store.check_integrity()
        if number > 100:
            assert store.num_tokens > 500 - 60
    store.check_integrity()


def test_the_oldest_outputs_go_first():
    store = SuffixStore(max_tokens=20, max_length=4)
    for number in range(4):
        store.add(str(number), ids(*range(10 * number, 10 * number + 4)))
    assert [occurrences(store, 10 * number, 10 * number + 1) for number in range(4)] == [1, 1, 1, 1]
    store.add("4", ids(40, 41, 42))
    assert [occurrences(store, 10 * number, 10 * number + 1) for number in range(5)] == [0, 0, 1, 1, 1]


def test_an_output_without_end_is_cut_to_its_end():
    store = SuffixStore(max_tokens=20, max_length=4)
    store.add("long", ids(*range(100)))
    assert store.num_tokens == 10
    assert occurrences(store, 98, 99) == 1
    assert occurrences(store, 89, 90) == 0


def test_a_preempted_request_is_stored_once():
    store = SuffixStore(max_tokens=100, max_length=4)
    store.add("a", ids(1, 2, 3))
    store.add("a", ids(1, 2, 3))
    store.add("a", ids(1, 2, 3, 4, 5))
    store.add("a", ids(1, 2, 3, 4, 5))
    assert occurrences(store, 1, 2, 3) == 1
    assert occurrences(store, 4, 5) == 1
    store.check_integrity()


def test_a_preempted_request_is_stored_once_across_generations():
    store = SuffixStore(max_tokens=20, max_length=4)
    store.add("a", ids(1, 2, 3))
    store.add("b", ids(*range(20, 26)))
    store.add("a", ids(1, 2, 3, 4))
    store.add("a", ids(1, 2, 3, 4))
    assert occurrences(store, 1, 2) == 1
    assert occurrences(store, 4) == 1


def test_another_text_under_an_old_id_is_stored():
    store = SuffixStore(max_tokens=100, max_length=4)
    store.add("a", ids(1, 2, 3))
    store.add("a", ids(7, 8, 9, 10))
    assert occurrences(store, 1, 2, 3) == 1
    assert occurrences(store, 7, 8, 9) == 1


def test_no_string_runs_from_one_output_into_the_next():
    store = SuffixStore(max_tokens=100, max_length=4)
    store.add("a", ids(1, 2))
    store.add("b", ids(3, 4))
    assert occurrences(store, 2, 3) == 0


def test_empty_outputs_take_no_room():
    store = SuffixStore(max_tokens=100, max_length=4)
    store.add("a", ids())
    assert store.num_tokens == 0
    assert store.automata == []


def test_too_small_a_store_is_refused():
    with pytest.raises(ConfigError, match="store_tokens must be an integer >= 4; got 3: try 100000"):
        SuffixStore(max_tokens=3, max_length=4)
