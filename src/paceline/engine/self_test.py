"""Whether a drafter is any good: its first drafts in an engine tell."""

from __future__ import annotations

import warnings

from paceline.engine.packing import node_depths
from paceline.errors import PacelineWarning
from paceline.types import Draft

_NUM_DRAFTS = 32
_LEAST_RATE = 0.02


class SelfTest:
    """Watches the first drafts of an engine and warns once if hardly a token of them was accepted.

    A draft counts with the tokens that it could have brought at most, those on its longest path: the siblings of a
    tree are not meant to be accepted together.
    """

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._num_drafts = 0
        self._possible = 0
        self._accepted = 0

    def note(self, draft: Draft, *, num_accepted: int) -> None:
        """One verified draft. Gives a PacelineWarning at the last of the first drafts."""
        if self._num_drafts == _NUM_DRAFTS:
            return
        self._num_drafts += 1
        self._possible += int(node_depths(draft).max())
        self._accepted += num_accepted
        if self._num_drafts == _NUM_DRAFTS and self._accepted < _LEAST_RATE * self._possible:
            warnings.warn(
                f"the first {_NUM_DRAFTS} drafts of {self._drafter!r} had {self._accepted} of {self._possible} tokens "
                "accepted, so they cost more than they bring: try another method, or speculation none.",
                PacelineWarning,
                stacklevel=2,
            )
