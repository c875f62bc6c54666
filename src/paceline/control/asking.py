"""How much to ask for: whether a request's drafts are worth their time, and those of each of several drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_GAIN_RATE = 0.12  # weight of the newest try
_MOST_TIMES = 4.0  # the usual time that counts of a single draft: the rest is a hiccup, unless it comes again
_FREE_TRIES = 8  # steps in which all are asked before any is judged
_BORROWED_TRIES = 2  # that what others brought counts for, where a request is new
_VAIN_TRIES, _MOST_WAITS = 6, 4  # tries after which the next ones come later, and by how much at most
_FREE_LENGTHS, _FREE_LENGTH = 4, 4  # drafts of a slow drafter before it is judged, and their nodes
_FULL_EVERY = 8  # drafts after which one has the whole length, so that what lies beyond stays known
_BEYOND = 0.8  # of a depth's gain that the next one is thought to bring, where nobody has been
_PROMISES = (0.25, 0.75, 1.5, 3.0)  # accepted nodes that the other drafters expect: bounds of situations


@dataclass(slots=True)
class Worth:
    """What asking brings and costs of late, but for slow drafters that do not pay."""

    tries: int = 0
    gain: float = 0.0  # seconds that a draft's nodes save beyond their own
    seconds: float = 0.0  # to draft, and for what follows

    @property
    def pays(self) -> bool:
        return self.gain > self.seconds

    def note(self, gain: float, seconds: float) -> None:
        self.tries += 1
        weight = max(1 / self.tries, _GAIN_RATE)
        self.gain += weight * (gain - self.gain)
        self.seconds += weight * (seconds - self.seconds)


@dataclass(slots=True)
class Lengths:
    """What the nodes of one slow drafter bring, by depth, in one situation."""

    tries: int = 0
    skipped: int = 0
    gains: list[float] = field(default_factory=list)  # seconds that its node at each depth saves beyond its row

    def note(self, gains: Sequence[float]) -> None:
        """A try: what the node at each depth, up to the length that was asked for, saved."""
        self.tries, self.skipped = self.tries + 1, 0
        weight = max(1 / self.tries, _GAIN_RATE)
        for depth, gain in enumerate(gains):
            if depth < len(self.gains):
                self.gains[depth] += weight * (gain - self.gains[depth])
            else:
                self.gains.append(gain)

    def best(self, limit: int, seconds_per_node: float) -> int:
        """Nodes, at most limit, that save the most beyond the time to draft them; 0 = none would."""
        if self.tries < _FREE_LENGTHS:
            return min(limit, _FREE_LENGTH)
        best, value, most, gain = 0, 0.0, 0.0, 0.0
        for depth in range(limit):
            gain = self.gains[depth] if depth < len(self.gains) else _BEYOND * gain
            value += gain - seconds_per_node
            if value > most:
                best, most = depth + 1, value
        return limit if best and self.tries % _FULL_EVERY == 0 else best


class Asking:
    """What is known of requests, and of slow drafters by what those before them promise: where these know what comes
    next, another one has little to add. Each request has records of its own, which begin as those of all have become.
    """

    def __init__(self) -> None:
        self.common = Worth()  # of a request, on average over those of a step
        self._untried = 0  # steps since all were asked
        self._in_vain = 0  # steps with drafts in a row that did not save the time for them
        self._requests: dict[str, Worth] = {}
        self._common_lengths: dict[tuple[str, int], Lengths] = {}
        self._lengths: dict[str, dict[tuple[str, int], Lengths]] = {}
        self._met: dict[str, set[str]] = {}  # drafters that have drafted for a request; "": any

    @property
    def waits(self) -> int:
        """Times as long between two tries, the longer they have been in vain."""
        return 1 + min(self._in_vain // _VAIN_TRIES, _MOST_WAITS - 1)

    def asked(self, gain: float, seconds: float) -> None:
        """What the drafts of a step brought and cost, by request."""
        self.common.note(gain, seconds)
        self._in_vain = 0 if gain > seconds else self._in_vain + 1

    def is_time_to_try(self, steps_between_tries: int) -> bool:
        """Whether all requests are to be asked, also where that did not pay of late, to see whether it does by now. All
        together, as much of what drafts take is shared by those of a step."""
        return self.common.tries < _FREE_TRIES or self._untried >= steps_between_tries

    def rest(self, steps_between_tries: int) -> int:
        """Steps that may go by after this one until it is time."""
        return max(0, steps_between_tries - self._untried - 1)

    def tried(self) -> None:
        """All are asked in this step."""
        self._untried = 0

    def step_over(self) -> None:
        self._untried += 1

    def length(self, own: Lengths, common: Lengths, limit: int, *, seconds_per_node: float, tries_every: int) -> int:
        """Nodes to ask a slow drafter for; tries_every: nodes that may go by for each that is drafted in vain."""
        own.skipped, common.skipped = own.skipped + 1, common.skipped + 1
        best = own.best(limit, seconds_per_node)
        if best == 0 and max(own.skipped, common.skipped) >= tries_every * min(limit, _FREE_LENGTH):
            common.skipped = 0
            return min(limit, _FREE_LENGTH)
        return best

    def has_asked(self, request_id: str) -> bool:
        return request_id in self._met

    def worth(self, request_id: str) -> Worth:
        """Of a request that it does not know yet what is known of all; tries of others say little of it."""
        if request_id not in self._requests:
            self._in_vain = 0
            common = self.common
            self._requests[request_id] = Worth(min(common.tries, _BORROWED_TRIES), common.gain, common.seconds)
        return self._requests[request_id]

    def lengths(self, request_id: str, drafter: str, promised: float) -> tuple[Lengths, Lengths]:
        """The request's own, and that of all. promised: accepted nodes that the drafters before this one expect."""
        key = drafter, sum(promised >= bound for bound in _PROMISES)
        common = self._common_lengths.setdefault(key, Lengths())
        own = self._lengths.setdefault(request_id, {})
        if key not in own:
            own[key] = Lengths(min(common.tries, _FREE_LENGTHS), 0, list(common.gains))
        return own[key], common

    def meet(self, request_id: str, drafter: str) -> bool:
        """Whether the drafter drafts for the request for the first time; it is noted."""
        met = self._met.setdefault(request_id, set())
        new = drafter not in met
        met.add(drafter)
        return new

    def release(self, request_id: str) -> None:
        """The request is over."""
        self._met.pop(request_id, None)
        self._requests.pop(request_id, None)
        self._lengths.pop(request_id, None)


@dataclass(slots=True)
class Stopwatch:
    """Seconds of a drafter for each node, where nodes come one by one, otherwise for each draft. Of a single stall no
    more counts than a few times the usual."""

    usual: float
    last: float = 0.0
    started: bool = False

    def counted(self, seconds: float, units: int) -> float:
        """What counts of the seconds that so many nodes, or drafts, took."""
        own = seconds / units
        counted = min(own, max(_MOST_TIMES * self.usual, self.last))
        self.usual = self.usual + _GAIN_RATE * (counted - self.usual) if self.started else counted
        self.last, self.started = own, True
        return counted * units
