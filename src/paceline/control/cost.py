"""What a target pass costs: measured once, and corrected by every pass of decoding."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from paceline.control.passes import chain_pass, fill_context, greedy
from paceline.interfaces import Runner

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # that are measured; between them a cost is a straight line
_STEADY = 8  # rows from which on no further row costs less than the one before it
_CONTEXTS = (32, 1024)  # tokens before them: the difference tells what a key costs, and reading a token's K/V
_MOST_CONTEXT_ROWS = 8  # besides one row as many as there are, up to this, are measured with both
_FILLED = 128  # tokens whose K/V is computed; those beyond are copies
_MEASURING_SECONDS = 1.5
_MOST_REPEATS, _LEAST_REPEATS = 7, 3  # the latter of single rows, whose differences tell what a context costs
_TABLE = 129  # rows whose costs are looked up; beyond them the last slope goes on
_REBUILD = 16  # passes between two renewals of the table
_ALL_RATE = 0.03  # how far one pass moves the costs of all passes, and
_OWN_RATE = 0.05  # those of its own number of rows
_MOST_LOG = 0.25  # of a deviation that counts: a neighbour's hiccup moves no more than a small one
_MOST_MOVED = 0.5  # of what was measured, up or down: how far the curve may leave its shape at one place


class PassCosts:
    """Seconds of a target pass over r rows that look at k keys, and read the K/V of c tokens, which the rows of a
    request share: (curve(r) + k * seconds_per_key + c * seconds_per_context) * the machine's pace.

    seconds: of passes over some row counts, 1 among them, without keys. The curve never falls, whatever was measured:
    noise must not make a longer pass look cheaper. `observe` moves pace and curve towards what passes take now, a
    little with each, however far off that is. Where the curve moves, all of it beyond moves along: that passes over 16
    rows take longer than they did says nothing of what a 17th adds.
    """

    def __init__(
        self, seconds: Mapping[int, float], *, seconds_per_key: float = 0.0, seconds_per_context: float = 0.0
    ) -> None:
        self._rows = sorted(seconds)
        self._measured = list(accumulate((seconds[rows] for rows in self._rows), max))
        self._moved = [0.0] * len(self._rows)  # seconds by which the curve has moved from these rows on
        self._per_key, self._per_context = seconds_per_key, seconds_per_context
        self._pace = 0.0  # log
        self._num_observed = 0
        self._curve: list[float] = []
        self._factor = 1.0
        self._rebuild()

    def seconds(self, rows: int, keys: int = 0, contexts: int = 0) -> float:
        """Of a pass over `rows` >= 1."""
        curve = self._curve
        own = curve[rows] if rows < _TABLE else curve[-1] + (rows - _TABLE + 1) * (curve[-1] - curve[-2])
        return (own + keys * self._per_key + contexts * self._per_context) * self._factor

    def observe(self, rows: int, keys: int, contexts: int, seconds: float) -> None:
        """A pass took so long."""
        off = math.log(max(seconds, 1e-9) / self.seconds(rows, keys, contexts))
        off = min(_MOST_LOG, max(-_MOST_LOG, off))
        self._pace += _ALL_RATE * off
        right = min(bisect_right(self._rows, rows), len(self._rows) - 1)
        left = max(0, right - 1)
        span = self._rows[right] - self._rows[left]
        share = min(1.0, (rows - self._rows[left]) / span) if span else 1.0
        for index, weight in ((left, 1.0 - share), (right, share)):
            most, moved = _MOST_MOVED * self._measured[index], _OWN_RATE * weight * off * self._measured[index]
            self._moved[index] = min(most, max(-most, self._moved[index] + moved))
        self._num_observed += 1
        if self._num_observed % _REBUILD == 0:
            self._rebuild()

    def as_json(self) -> dict[str, Any]:
        """The measured costs for a file."""
        seconds = {str(rows): own for rows, own in zip(self._rows, self._measured, strict=True)}
        return {"seconds": seconds, "seconds_per_key": self._per_key, "seconds_per_context": self._per_context}

    @classmethod
    def from_json(cls, value: Any) -> PassCosts:
        """What as_json made. Raises ValueError for anything else."""
        try:
            seconds = {int(rows): float(own) for rows, own in value["seconds"].items()}
            per_key, per_context = float(value["seconds_per_key"]), float(value["seconds_per_context"])
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"no costs of passes: {value!r:.100}") from error
        plausible = (
            all(1e-7 <= own < 1e3 for own in seconds.values()) and 0 <= per_key < 1e-3 and 0 <= per_context < 1e-3
        )
        if not plausible or min(seconds, default=0) != 1 or max(seconds) > 1 << 16:
            raise ValueError(f"no costs of passes: {value!r:.100}")
        return cls(seconds, seconds_per_key=per_key, seconds_per_context=per_context)

    def _rebuild(self) -> None:
        self._factor = math.exp(self._pace)
        least = 1 - _MOST_MOVED  # of several places' moves together, too
        moved = [max(least * own, own + by) for own, by in zip(self._measured, accumulate(self._moved), strict=True)]
        rising = list(accumulate(reversed(moved), min))[::-1]  # shorter passes take no longer than what was observed
        rows = np.arange(_TABLE)
        curve = np.interp(rows, self._rows, rising)
        last, before = (self._rows[-1], self._rows[-2]) if len(self._rows) > 1 else (1, 0)
        slope = (rising[-1] - (rising[-2] if len(rising) > 1 else 0.0)) / (last - before)
        curve[rows > last] = rising[-1] + slope * (rows[rows > last] - last)
        self._curve = curve.tolist()


def measure(runner: Runner, *, max_rows: int) -> PassCosts:
    """Costs of greedy passes over up to max_rows rows, as medians of interleaved repeats. Takes less than two seconds;
    of a large model only as many row counts are measured as fit into that, and the last one.

    The runner's K/V pool must be free: its contents are lost.
    """
    room = min(runner.max_model_len, runner.kv.num_blocks * runner.kv.block_size)
    most = max(1, min(max_rows, room - 1))
    counts = [rows for rows in _ROWS if rows <= most]
    both = {1, max(rows for rows in counts if rows <= _MOST_CONTEXT_ROWS)}  # that are measured after either context
    short, long = (min(context, room - rows) for context, rows in zip(_CONTEXTS, (most, max(both)), strict=True))
    times: dict[tuple[int, int], list[float]] = {}
    _fill(runner, long)
    began = time.perf_counter()
    for rows in counts:
        if rows not in both | {counts[-1]} and time.perf_counter() - began > _MEASURING_SECONDS:
            continue
        for context in dict.fromkeys((short, long)) if rows in both else (short,):
            _timed_pass(runner, rows, context)  # warms up
            times[rows, context] = [_timed_pass(runner, rows, context)]
    for repeat in range(_MOST_REPEATS):
        if time.perf_counter() - began > _MEASURING_SECONDS:
            break
        for rows, context in times if repeat % 2 else reversed(times):
            times[rows, context].append(_timed_pass(runner, rows, context))
    while len(times[1, short]) < _LEAST_REPEATS:
        for context in dict.fromkeys((short, long)):
            times[1, context].append(_timed_pass(runner, 1, context))
    return _fitted(times)


def _timed_pass(runner: Runner, rows: int, context: int) -> float:
    """Seconds of a pass after so many tokens."""
    batch = chain_pass(np.zeros(rows, dtype=np.int32), context=context, block_size=runner.kv.block_size)
    sampling = greedy(batch.positions.astype(np.uint32) + np.uint32(1))
    start = time.perf_counter()
    runner.forward(batch, sampling)
    return time.perf_counter() - start


def _fill(runner: Runner, count: int) -> None:
    """K/V of so many tokens in the first slots of the pool, where it differs from place to place: reading it takes as
    long as that of a text, other than of memory that was never written."""
    fill_context(runner, np.zeros(min(count, _FILLED), dtype=np.int32))
    for start in range(_FILLED, count, _FILLED):
        copies = np.arange(min(_FILLED, count - start), dtype=np.int64)
        runner.move(copies, copies + start)


def _fitted(times: Mapping[tuple[int, int], Sequence[float]]) -> PassCosts:
    """times: seconds of the repeats of passes over (rows, context)."""
    short, long = min(context for _, context in times), max(context for _, context in times)
    both = [rows for rows, context in times if context == long]

    def per_token(rows: int) -> float:  # of the context: its K/V is read once, and each row looks at its key
        more = np.subtract(times[rows, long], times[rows, short])  # repeat by repeat: those are close in time
        return float(np.median(more)) / max(1, long - short)

    most = max(both)
    per_key = max(0.0, (per_token(most) - per_token(1)) / max(1, most - 1))
    per_context = max(0.0, per_token(1) - per_key)
    seconds = {
        rows: float(np.median(own)) - (per_key * rows + per_context) * context
        for (rows, context), own in times.items()
        if context == short
    }
    falling = sorted(seconds, reverse=True)  # no pass takes longer than one over more rows did: that was a hiccup
    least = accumulate((max(seconds[rows], 1e-7) for rows in falling), min)
    return PassCosts(
        _steady(dict(zip(falling, least, strict=True))),
        seconds_per_key=per_key,
        seconds_per_context=per_context,
    )


def _steady(seconds: Mapping[int, float]) -> dict[int, float]:
    """Costs by rows, of which from _STEADY rows on none makes the next one cheaper: where a measured slope is less than
    the one before it, that is noise, and both become their mean."""
    counts = sorted(rows for rows in seconds if rows >= _STEADY)
    slopes: list[tuple[float, int]] = []  # seconds and rows of stretches, each steeper than the one before it
    for before, rows in pairwise(counts):
        rise, span = seconds[rows] - seconds[before], rows - before
        while slopes and slopes[-1][0] / slopes[-1][1] > rise / span:
            flatter = slopes.pop()
            rise, span = rise + flatter[0], span + flatter[1]
        slopes.append((rise, span))
    if not slopes:
        return dict(seconds)
    rises, spans = zip(*slopes, strict=True)
    smooth = np.interp(counts, np.cumsum([counts[0], *spans]), np.cumsum([seconds[counts[0]], *rises]))
    return {**seconds, **dict(zip(counts, smooth.tolist(), strict=True))}
