"""What the extension does of suffix and recycle, against the Python that does the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import _native
from paceline.draft.automaton import ROOT, SEPARATOR, SuffixAutomaton, check_integrity
from paceline.draft.successor_rows import Seen, SuccessorRows
from paceline.draft.successors import SuccessorTable

V, WIDTH = 12, 4
NOTHING = np.zeros(0, dtype=np.int32)

texts = st.one_of(
    st.lists(st.integers(0, 2), max_size=40),
    st.lists(st.integers(0, 9), max_size=40),
    st.builds(lambda unit, times: unit * times, st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 9)),
)


def as_lists(grown: tuple[Any, ...]) -> list[Any]:
    *arrays, score = grown
    return [*((array.dtype.name, array.tolist()) for array in arrays), score]


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(texts, max_size=5), st.integers(2, 6), texts)
def test_automata_do_the_same(parts, max_length, other):
    """Also between separators, and where states have more followers than are looked at."""
    own, twin = SuffixAutomaton(max_length=max_length), _native.SuffixAutomaton(max_length=max_length)
    for part in [*parts, [token for follower in range(100, 170) for token in (1, follower)]]:
        for automaton in (own, twin):
            automaton.extend([*part, SEPARATOR])
            automaton.extend(part)
            check_integrity(automaton)
        assert (own.num_states, own.num_tokens, own.max_length) == (twin.num_states, twin.num_tokens, twin.max_length)
        assert own.repeated_suffix() == twin.repeated_suffix()
        assert own.find_suffix(other) == twin.find_suffix(other)
        for state in range(own.num_states):
            assert own.length(state) == twin.length(state)
            assert own.count(state) == twin.count(state)
            assert own.followers(state, limit=9) == twin.followers(state, limit=9)
            assert own.target(state, 1) == twin.target(state, 1)
            if state != ROOT:
                suffix = own.longest_suffix(state)
                assert suffix == twin.longest_suffix(state)
                length = suffix[1] + 1
                assert own.shorten(state, length, to=length - 1) == twin.shorten(state, length, to=length - 1)
                for chain in (False, True):
                    grown = [a.grow(state, length, 9, min_probability=0.05, chain=chain) for a in (own, twin)]
                    assert as_lists(grown[0]) == as_lists(grown[1])


def test_an_automaton_refuses_what_it_cannot_take():
    twin = _native.SuffixAutomaton(max_length=4)
    for state in (-1, 1, 1 << 30):
        with pytest.raises(IndexError):
            twin.count(state)
        with pytest.raises(IndexError):
            twin.grow(state, 1, 4, min_probability=0.1, chain=False)
    for wrong in (lambda: twin.longest_suffix(ROOT), lambda: twin.shorten(ROOT, 2, to=1), lambda: twin.extend([1, -2])):
        with pytest.raises(ValueError, match=r"no suffix|as short as|no token"):
            wrong()
    assert twin.num_tokens == 0, "nothing of a list with a token that is none was taken"


def both() -> list[tuple[dict[str, np.ndarray], Any]]:
    """The arrays of a table and their rows in Python, and again with those of the extension."""
    own, other = (SuccessorTable(vocab_size=V, width=WIDTH)._arrays() for _ in range(2))
    twin = _native.SuccessorRows(**other)
    return [(own, SuccessorRows(**own)), (other, twin)]


def drafted(rng: random.Random, dtype: str) -> Seen:
    """A random tree with a random path through it; some successors are not known."""
    count = rng.randint(0, 6)
    parents, path = [rng.randint(-1, node - 1) for node in range(count)], []
    for node, parent in enumerate(parents):
        if parent == (path[-1] if path else -1) and rng.random() < 0.6:
            path.append(node)
    rows = [rng.sample(range(V), WIDTH) if rng.random() < 0.9 else [-1] * WIDTH for _ in range(1 + count)]
    return Seen(
        rng.randint(-1, V - 1),
        rng.randrange(V),
        np.array([rng.randrange(V) for _ in range(count)], dtype=dtype),
        np.array(parents, dtype=dtype),
        tuple(path),
        rng.randrange(V),
        np.array(rows, dtype=np.int32),
    )


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("seed", range(8))
def test_rows_do_the_same(seed: int, dtype: str) -> None:
    rng = random.Random(seed)
    (own_arrays, own), (twin_arrays, twin) = both()
    for _ in range(30):
        step = [drafted(rng, dtype) for _ in range(rng.randint(1, 3))]
        own.learn(step)
        twin.learn(step)
        for name, values in own_arrays.items():
            np.testing.assert_array_equal(values, twin_arrays[name], err_msg=name)
        assert own.rates == twin.rates
        before, root = rng.randint(-1, V - 1), rng.randrange(V)
        assert own.look(before, root) == twin.look(before, root)
        for chain in (False, True):
            grown = [rows.grow(before, root, 9, least_reach=0.01, chain=chain) for rows in (own, twin)]
            for left, right in zip(*grown, strict=True):
                assert (left.dtype, left.tolist()) == (right.dtype, right.tolist())


def test_rows_refuse_what_does_not_fit() -> None:
    (_, _), (own_arrays, twin) = both()
    before = {name: values.copy() for name, values in own_arrays.items()}
    good: dict[str, Any] = Seen(0, 1, NOTHING, NOTHING, (), 2, np.array([[3, 4, 5, 6]], dtype=np.int32))._asdict()
    bad: list[dict[str, Any]] = [
        {"root": V},
        {"root": -1},
        {"before": -2},
        {"final_token": V},
        {"path": (0,)},
        {"token_ids": np.array([1], dtype=np.int32)},
        {"successors": np.array([[3, 4, 5, V]], dtype=np.int32)},
        {"successors": np.array([[3, 4, 5]], dtype=np.int32)},
        {"token_ids": np.array([1], dtype=np.int32), "parents": np.array([0], dtype=np.int32)},
    ]
    for wrong in bad:
        with pytest.raises(ValueError, match=r"outside the|do not fit|before its parent"):
            twin.learn([Seen(**good), Seen(**(good | wrong))])
    for look in (lambda: twin.look(0, V), lambda: twin.grow(0, -1, 4, least_reach=0.1, chain=False)):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            look()
    with pytest.raises(ValueError, match="not those of a table"):
        _native.SuccessorRows(**(own_arrays | {"trials": np.zeros(3)}))
    for name, values in own_arrays.items():
        np.testing.assert_array_equal(values, before[name], err_msg=name)
