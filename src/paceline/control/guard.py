"""What speculation may lose: a budget that bounds it, whatever drafters and estimates do."""

from __future__ import annotations


class Guard:
    """Speculation goes on only so far as what it has lost against plain decoding, and what its next step may lose at
    worst, are within `budget_seconds` + `share` of the time that has passed.

    So long as plain steps take what they are said to, the whole takes at most plain decoding's time * (1 + share), to
    first order, + budget_seconds.
    """

    def __init__(self, *, budget_seconds: float, share: float = 0.02) -> None:
        self._budget = budget_seconds
        self._share = share
        self._lost = 0.0
        self._elapsed = 0.0

    @property
    def lost_seconds(self) -> float:
        """Of all steps so far over plain decoding of the same tokens; below 0 = gained."""
        return self._lost

    @property
    def allowance(self) -> float:
        """Seconds that the next step may lose at worst."""
        return self._budget + self._share * self._elapsed - self._lost

    def note(self, seconds: float, *, plain_seconds: float) -> None:
        """A step took `seconds`; plain decoding of the tokens that it brought would have taken plain_seconds.

        Gains are not saved up beyond the budget: a drafter that was good once may not squander them.
        """
        self._elapsed += seconds
        self._lost = max(self._lost + seconds - plain_seconds, -self._budget)
