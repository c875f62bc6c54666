"""Whether a drafter is any good: the first steps of an engine tell."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from paceline.errors import PacelineWarning
from paceline.params import PREDICTION
from paceline.types import Draft, Verdict

_NUM_STEPS = 32
_LEAST_RATE = 0.02


class SelfTest:
    """Watches the first steps of an engine that verify drafts and warns once if hardly a token of these was accepted.

    A draft counts with the tokens that it could have brought at most, those on its longest path: the siblings of a
    tree are not meant to be accepted together. What a request predicted of its output is not the drafter's fault.
    """

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._num_steps = 0
        self._possible = 0
        self._accepted = 0

    def note(self, drafts: Sequence[Draft | None], verdicts: Sequence[Verdict | None]) -> None:
        """One step, which counts if it verified a draft. Gives a PacelineWarning at the last of the first ones."""
        if self._num_steps == _NUM_STEPS:
            return
        verified = [
            (draft, verdict)
            for draft, verdict in zip(drafts, verdicts, strict=True)
            if draft is not None and verdict is not None and draft.source != PREDICTION
        ]
        if not verified:
            return
        self._num_steps += 1
        for draft, verdict in verified:
            self._possible += int(draft.depths().max())
            self._accepted += len(verdict.path)
        if self._num_steps == _NUM_STEPS and self._accepted < _LEAST_RATE * self._possible:
            warnings.warn(
                f"over the first {_NUM_STEPS} steps with drafts {self._drafter!r} had {self._accepted} of "
                f"{self._possible} tokens accepted, so they cost more than they bring: try another method, or "
                "speculation none.",
                PacelineWarning,
                stacklevel=2,
            )
