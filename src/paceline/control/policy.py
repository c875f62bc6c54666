"""How much to draft."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.types import Observation, RequestView


class FixedLength:
    """Every request drafts the same number of nodes in every step, or as many as its limit allows."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_speculative_tokens = num_speculative_tokens

    def plan(self, views: Sequence[RequestView], limits: Sequence[int]) -> list[int]:
        return [min(limit, self._num_speculative_tokens) for limit in limits]

    def observe(self, step: Observation) -> None:
        """A fixed length learns nothing."""
