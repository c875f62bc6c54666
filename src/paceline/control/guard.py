"""What speculation may lose against plain decoding: a budget that bounds it, whatever drafters propose."""

from __future__ import annotations


class Guard:
    """Speculation goes on only so far as what its next step may lose at worst is within its allowance.

    That is `budget_seconds` at first. Losses lower it, gains and `share` of the time that passes raise it again, never
    beyond budget_seconds: a drafter that was good once may not squander what it earned. Over any time speculation loses
    no more than budget_seconds + share * that time, and what a single step loses unforeseen.
    """

    def __init__(self, *, budget_seconds: float, share: float = 0.02) -> None:
        self._budget = budget_seconds
        self._share = share
        self.allowance = budget_seconds  # seconds that the next step may lose

    def note(self, seconds: float, *, lost: float) -> None:
        """A step took `seconds`, `lost` of them more than plain decoding of the same tokens; below 0 = gained."""
        self.allowance = min(self._budget, self.allowance + self._share * seconds - lost)
