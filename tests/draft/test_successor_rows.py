"""SuccessorRows against writing many rows at once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.successor_rows import Seen, SuccessorRows
from paceline.draft.successors import SuccessorTable

V, WIDTH = 12, 4
NOTHING = np.zeros(0, dtype=np.int32)


def arrays(table: SuccessorTable) -> dict[str, np.ndarray]:
    return table._arrays()


def plain(before: int, root: int, final_token: int, successors: list[int]) -> Seen:
    return Seen(before, root, NOTHING, NOTHING, (), final_token, np.array([successors], dtype=np.int32))


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
    own = SuccessorRows(**arrays(SuccessorTable(vocab_size=V, width=WIDTH)))
    said = np.array([[1, 2, 3, 4], [5, 2, 3, 4], [6, 2, 3, 4]], dtype=np.int32)
    tokens, parents = np.array([1, 7], dtype=np.int32), np.array([-1, -1], dtype=np.int32)
    own.learn([Seen(0, 7, tokens, parents, (0,), 5, said), Seen(7, 7, *[NOTHING] * 2, (), 1, said[:1])])
    assert own.look(7, 7)[0] == [1, 2, 3, 4], "the text's, not that of the node that was dropped"
    assert own.look(7, 1)[0] == [5, 2, 3, 4]
