"""SuffixAutomaton against counting by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.automaton import NO_STATE, ROOT, SuffixAutomaton, check_integrity

texts = st.one_of(
    st.lists(st.integers(0, 2), max_size=40),
    st.lists(st.integers(0, 9), max_size=40),
    st.builds(lambda unit, times: unit * times, st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 9)),
)


def automaton_of(text: list[int], max_length: int = 6) -> SuffixAutomaton:
    automaton = SuffixAutomaton(max_length=max_length)
    automaton.extend(text)
    return automaton


def ends(text: list[int], string: list[int]) -> list[int]:
    return [e for e in range(len(string), len(text) + 1) if text[e - len(string) : e] == string]


def state_of(automaton: SuffixAutomaton, string: list[int]) -> int:
    state = ROOT
    for token in string:
        state = automaton.target(state, token)
        if state == NO_STATE:
            break
    return state


@settings(derandomize=True, max_examples=200, deadline=None)
@given(texts, st.integers(1, 6))
def test_counts_ends_and_successors_of_every_string(text, max_length):
    automaton = automaton_of(text, max_length)
    check_integrity(automaton)
    for start in range(len(text) + 1):
        for end in range(start, len(text) + 1):
            string = text[start:end]
            state = state_of(automaton, string)
            places = ends(text, string)
            assert len(string) <= automaton.length(state)
            assert state == ROOT or automaton.longest_suffix(state)[1] < len(string)
            followers = automaton.followers(state, limit=99)
            assert {token for _, _, token, _ in followers} == {text[e] for e in places if e < len(text)}
            if len(string) <= max_length:
                assert automaton.count(state) == len(places)
                assert automaton.num_followed(state) == sum(e < len(text) for e in places)
            if len(string) < max_length:
                for count, latest, token, target in followers:
                    longer = ends(text, [*string, token])
                    assert (count, latest) == (len(longer), longer[-1])
                    assert target == state_of(automaton, [*string, token])


@settings(derandomize=True, max_examples=200, deadline=None)
@given(texts, st.integers(1, 6))
def test_repeated_suffix_is_right_after_every_token(text, max_length):
    automaton = SuffixAutomaton(max_length=max_length)
    for known, token in enumerate(text, 1):
        automaton.extend([token])
        state, length = automaton.repeated_suffix()
        so_far = text[:known]
        repeated = [n for n in range(1, min(known, max_length + 1)) if len(ends(so_far, so_far[known - n :])) > 1]
        assert length == max(repeated, default=0)
        assert state == state_of(automaton, so_far[known - length :])


@settings(derandomize=True, deadline=None)
@given(texts, st.lists(st.integers(0, 3), max_size=12))
def test_finds_the_longest_suffix_of_other_tokens(text, other):
    automaton = automaton_of(text)
    state, length = automaton.find_suffix(other)
    assert length == max(n for n in range(len(other) + 1) if ends(text, other[len(other) - n :]) or n == 0)
    assert state == state_of(automaton, other[len(other) - length :])


@settings(derandomize=True, deadline=None)
@given(texts)
def test_shortened_string_is_its_suffix(text):
    automaton = automaton_of(text)
    for end in range(len(text) + 1):
        string = text[max(0, end - 4) : end]
        for to in (len(string), len(string) - 1):
            if to >= 0:
                state, length = automaton.shorten(state_of(automaton, string), len(string), to=to)
                assert (state, length) == (state_of(automaton, string[len(string) - to :]), to)


def test_followers_are_limited_in_order_of_appearance():
    automaton = automaton_of([1, 5, 1, 6, 1, 7, 1, 5])
    state = automaton.target(ROOT, 1)
    assert [token for _, _, token, _ in automaton.followers(state, limit=2)] == [5, 6]


@pytest.mark.parametrize("period", [1, 2, 700])
def test_a_long_repetition_takes_linear_work(period, monkeypatch):
    """Steps, not seconds: each is one look at a transition."""
    looks = 0
    target = SuffixAutomaton.target

    def counted(self: SuffixAutomaton, state: int, token: int) -> int:
        nonlocal looks
        looks += 1
        return target(self, state, token)

    monkeypatch.setattr(SuffixAutomaton, "target", counted)
    unit = random.Random(1).choices(range(50), k=period)
    automaton = automaton_of((unit * (16_000 // period + 1))[:16_000], max_length=32)
    assert looks < 10 * 16_000
    assert automaton.num_states <= 2 * 16_000
    assert automaton.repeated_suffix()[1] == 32
