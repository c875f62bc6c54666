"""SuccessorRows against writing many rows at once, and the extension's against Python's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.successor_rows import Seen, SuccessorRows, successor_rows
from paceline.draft.successors import SuccessorTable

V, WIDTH = 12, 4
NOTHING = np.zeros(0, dtype=np.int32)


def arrays(table: SuccessorTable) -> dict[str, np.ndarray]:
    return table._arrays()


def both() -> list[tuple[dict[str, np.ndarray], SuccessorRows]]:
    """The arrays of a table and their rows in Python, and again with those of the extension."""
    own, other = (arrays(SuccessorTable(vocab_size=V, width=WIDTH)) for _ in range(2))
    twin = successor_rows(**other)
    if type(twin) is SuccessorRows:
        pytest.skip("the extension was not built")
    return [(own, SuccessorRows(**own)), (other, twin)]


def plain(before: int, root: int, final_token: int, successors: list[int]) -> Seen:
    return Seen(before, root, NOTHING, NOTHING, (), final_token, np.array([successors], dtype=np.int32))


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


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=9),
        max_size=6,
    )
)
def test_a_step_is_written_like_many_rows(steps) -> None:
    """The same pair, and the same token after others, several times in one step among them."""
    one_by_one, together = (SuccessorTable(vocab_size=V, width=WIDTH) for _ in range(2))
    rows = SuccessorRows(**arrays(one_by_one))
    for step in steps:
        said = [(before, token, [best, 4, 5, -1]) for before, token, best in step]
        rows.learn([plain(before, token, 0, successors) for before, token, successors in said])
        before, tokens, successors = zip(*said, strict=True)
        together.write(np.array(before), np.array(tokens), np.array(successors, dtype=np.int32))
    for name in ("successors", "kinds", "keys"):
        np.testing.assert_array_equal(arrays(one_by_one)[name], arrays(together)[name])


def test_what_dropped_nodes_say_does_not_replace_what_the_text_says() -> None:
    for own in (SuccessorRows(**arrays(SuccessorTable(vocab_size=V, width=WIDTH))), both()[1][1]):
        said = np.array([[1, 2, 3, 4], [5, 2, 3, 4], [6, 2, 3, 4]], dtype=np.int32)
        tokens, parents = np.array([1, 7], dtype=np.int32), np.array([-1, -1], dtype=np.int32)
        own.learn([Seen(0, 7, tokens, parents, (0,), 5, said), Seen(7, 7, *[NOTHING] * 2, (), 1, said[:1])])
        assert own.look(7, 7)[0] == [1, 2, 3, 4], "the text's, not that of the node that was dropped"
        assert own.look(7, 1)[0] == [5, 2, 3, 4]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("seed", range(8))
def test_the_extension_does_the_same(seed: int, dtype: str) -> None:
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


def test_the_extension_refuses_what_does_not_fit() -> None:
    (_, _), (own_arrays, twin) = both()
    before = {name: values.copy() for name, values in own_arrays.items()}
    good: dict[str, Any] = plain(0, 1, 2, [3, 4, 5, 6])._asdict()
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
        successor_rows(**(own_arrays | {"trials": np.zeros(3)}))
    for name, values in own_arrays.items():
        np.testing.assert_array_equal(values, before[name], err_msg=name)
