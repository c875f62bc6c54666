"""How many nodes to ask a drafter for that takes time, beside others that take none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_RATE = 0.1  # weight of the newest try
_FREE_TRIES, _FREE_LENGTH = 4, 4  # of a drafter, before it is judged, and their nodes
_FULL_EVERY = 8  # tries after which one has the whole length, so that what lies beyond stays known
_BEYOND = 0.8  # of a depth's gain that the next one is thought to bring, where nobody has been
_PROMISES = (0.25, 0.75, 1.5, 3.0)  # accepted nodes that the other drafters expect: classes of situations


@dataclass(slots=True)
class Record:
    """What one drafter's nodes have brought, by depth, in one situation."""

    tries: int = 0
    skipped: int = 0  # times since the last try
    gains: list[float] = field(default_factory=list)  # seconds that its node at each depth saves beyond its row

    def note(self, gains: Sequence[float]) -> None:
        """A try: what the node at each depth up to the length that was asked for saved, above 0 if it was kept."""
        self.tries += 1
        self.skipped = 0
        weight = max(1 / self.tries, _RATE)
        for depth, gain in enumerate(gains):
            if depth < len(self.gains):
                self.gains[depth] += weight * (gain - self.gains[depth])
            else:
                self.gains.append(gain)

    def length(self, limit: int, *, seconds_per_node: float, steps_between_tries: int) -> int:
        """Nodes to ask for, at most limit: those that save the most beyond the time to draft them; 0 = none would."""
        self.skipped += 1
        if self.tries < _FREE_TRIES:
            return min(limit, _FREE_LENGTH)
        best, value, most, gain = 0, 0.0, 0.0, 0.0
        for depth in range(limit):
            gain = self.gains[depth] if depth < len(self.gains) else _BEYOND * gain
            value += gain - seconds_per_node
            if value > most:
                best, most = depth + 1, value
        if best == 0:
            return limit if self.skipped >= steps_between_tries * limit else 0
        return limit if self.tries % _FULL_EVERY == 0 else best


class Asking:
    """Records of drafters that take time, each by what the drafters before it promise: where these know what comes
    next, another one has little to add. A request has its own records, which begin as those of all requests are."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, int], Record] = {}
        self._own: dict[str, dict[tuple[str, int], Record]] = {}

    def record(self, request_id: str, drafter: str, promised: float) -> Record:
        """promised: accepted nodes that the drafters before it expect."""
        key = drafter, sum(promised >= bound for bound in _PROMISES)
        own = self._own.setdefault(request_id, {})
        if key not in own:
            common = self.common(drafter, promised)
            own[key] = Record(min(common.tries, _FREE_TRIES), common.skipped, list(common.gains))
        return own[key]

    def common(self, drafter: str, promised: float) -> Record:
        """That of all requests."""
        return self._all.setdefault((drafter, sum(promised >= bound for bound in _PROMISES)), Record())

    def release(self, request_id: str) -> None:
        """The request is over."""
        self._own.pop(request_id, None)
