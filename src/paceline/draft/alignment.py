"""Where an output stands in the text that it was predicted to resemble."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

_LONGEST_MATCH = 8  # tokens that are compared to find the place again
_NEAR = 16  # tokens after the last known place, among which it is most likely found
_LONGEST_EDIT = 8  # tokens of a replacement that is expected again


class _Place(NamedTuple):
    """What comes next: a replacement's remaining tokens, then the prediction from an index on."""

    at: int
    rest: tuple[int, ...] = ()


class Alignment:
    """Follows an output through its prediction, over edits, and tells what comes next.

    While token after token is the expected one, a pointer moves along. Another token begins an edit, which lasts until
    the output's last tokens are found in the prediction again: a single one near the place where the edit began, more
    of them elsewhere, and the more the more often places turned out wrong. What an edit put in place of what is
    expected wherever the same tokens come again, so that only the first use of a renamed variable is a miss.

    Its state is a function of prediction and output alone. prediction: [P] int32.
    """

    def __init__(self, prediction: np.ndarray) -> None:
        self._prediction = prediction
        self._output: list[int] = []
        self._place = _Place(0)
        self._evidence = 1  # tokens up to the last one that were as expected; 0 = the place is not known
        self._found = False  # the place was found after an edit and has not been confirmed by another token
        self._edit_begin = (0, 0)  # indices in prediction and output where the latest edit began
        self._learned: tuple[int, ...] = ()  # the tokens that it replaced
        self._edits: dict[int, dict[tuple[int, ...], tuple[int, ...]]] = {}  # by first token: what became of which
        self._num_wrong = 0  # places that were found lately and were not confirmed

    @property
    def num_tokens(self) -> int:
        """Of the output so far."""
        return len(self._output)

    @property
    def evidence(self) -> int:
        """Tokens in a row, up to the last one, that were as expected; 0 = what comes next is not known."""
        return self._evidence

    def extend(self, token_ids: list[int]) -> None:
        """The output goes on with these tokens."""
        for token in token_ids:
            self._output.append(token)
            if not (self._evidence and self._follow(token)):
                self._search()

    def expected(self, count: int) -> list[int]:
        """The next `count` tokens; fewer at the prediction's end, none where the place is not known."""
        return [token for token, _ in islice(self._walk(), count)] if self._evidence else []

    def _walk(self) -> Iterator[tuple[int, _Place]]:
        """Each expected token, and the place after it."""
        at, rest = self._place
        while True:
            if not rest and (edit := self._edit_at(at)):
                old, rest = edit
                at += len(old)
            if rest:
                token, rest = rest[0], rest[1:]
            elif at < len(self._prediction):
                token, at = int(self._prediction[at]), at + 1
            else:
                return
            yield token, _Place(at, rest)

    def _edit_at(self, at: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The longest known edit of the tokens at an index of the prediction."""
        known = self._edits.get(int(self._prediction[at])) if at < len(self._prediction) else None
        if not known:
            return None
        coming = tuple(self._prediction[at : at + _LONGEST_EDIT].tolist())
        old = max((old for old in known if coming[: len(old)] == old), key=len, default=None)
        return None if old is None else (old, known[old])

    def _follow(self, token: int) -> bool:
        """Moves on if this token was expected; notes where an edit begins if not."""
        expected, place = next(self._walk(), (None, self._place))
        if token == expected:
            if self._found:
                self._found, self._num_wrong = False, 0
            self._place = place
            self._evidence += 1
            return True
        at, rest = self._place
        edit = None if rest else self._edit_at(at)
        if edit is not None:  # not made this time
            self._forget(edit[0])
            return self._follow(token)
        if self._found:
            self._found = False
            self._num_wrong += 1  # and the edit goes on
            self._forget(self._learned)
        else:
            self._edit_begin = at, len(self._output) - 1
        self._evidence = 0
        return False

    def _search(self) -> None:
        """Looks the output's last tokens up in the prediction; the longest match that is enough counts."""
        prediction, output = self._prediction, self._output
        begin = self._edit_begin[0]
        ends = np.flatnonzero(prediction == output[-1])
        best: tuple[int, int] | None = None
        for length in range(1, 1 + min(_LONGEST_MATCH, len(output))):
            if length > 1:
                ends = ends[ends >= length - 1]
                ends = ends[prediction[ends - length + 1] == output[-length]]
            if len(ends) == 0:
                break
            distances = ends - begin
            needed = np.where(distances < 0, 3, np.where(distances < _NEAR, 1, 2)) + self._num_wrong
            enough = np.flatnonzero(np.minimum(needed, _LONGEST_MATCH) <= length)
            if len(enough):
                nearest = enough[np.argmin(np.abs(distances[enough]))]
                best = int(ends[nearest]) + 1, length
        if best is not None:
            self._resume(*best)

    def _resume(self, at: int, length: int) -> None:
        """Goes on at an index of the prediction, after so many equal tokens."""
        self._place, self._evidence, self._found = _Place(at), length, True
        begin, first = self._edit_begin
        shared = max(0, min(length, at - begin, len(self._output) - first))
        old = tuple(self._prediction[begin : at - shared].tolist())
        new = tuple(self._output[first : len(self._output) - shared])
        self._learned = old
        if 1 <= len(old) <= _LONGEST_EDIT and len(new) <= _LONGEST_EDIT:
            self._edits.setdefault(old[0], {})[old] = new

    def _forget(self, old: tuple[int, ...]) -> None:
        if old:
            self._edits.get(old[0], {}).pop(old, None)
