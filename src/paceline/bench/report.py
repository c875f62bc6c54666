"""What `paceline bench` says of a measurement: medians over repeats, sums over requests, ratios of the modes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, median, stdev
from typing import Any

from paceline.bench.runner import MODES, Measurement, Mode, Sample
from paceline.types import SpeculationMetrics

_LEAST_REPEATS = 3  # for a bound


def summarize(measurement: Measurement) -> dict[str, Any]:
    """The JSON of `paceline bench`, but for model, settings and environment.

    `speedup` compares whole requests (wall time, of requests at once that of the mode's turns), `decode_speedup` the
    time from the first output token to the last.
    """
    by_category: dict[str, list[Sample]] = {}
    for sample in measurement.samples:
        by_category.setdefault(sample.prompt.category, []).append(sample)
    report: dict[str, Any] = {}
    for mode in MODES:
        samples = [sample for sample in measurement.samples if sample.mode == mode]
        report[mode] = _section(samples, wall_seconds=median(measurement.wall_seconds[mode]))
        report[mode]["by_category"] = {
            category: _section([sample for sample in own if sample.mode == mode])
            for category, own in by_category.items()
        }
    plain, speculative = (report[mode] for mode in MODES)
    metrics = sum(
        (sample.output.metrics for sample in measurement.samples if sample.mode == "speculative"), SpeculationMetrics()
    )
    ratios = _ratios(plain, speculative)
    found = {
        category: _ratios(plain["by_category"][category], speculative["by_category"][category])
        for category in by_category
    }
    speedups = _speedups({mode: _rates(report[mode]["tokens"], measurement.wall_seconds[mode]) for mode in MODES})
    return report | {
        **ratios,
        "speedup_range": (min(speedups), max(speedups)) if len(speedups) > 1 else None,  # one tells nothing of others
        "speedup_bound": _bound(ratios["speedup"], speedups),
        "decode_speedup_bound": _bound(ratios["decode_speedup"], _decode_speedups(measurement.samples)),
        "by_category": {
            category: {
                **own,
                "decode_speedup_bound": _bound(own["decode_speedup"], _decode_speedups(by_category[category])),
            }
            for category, own in found.items()
        },
        "acceptance_length": metrics.acceptance_length,
        "acceptance_rate": metrics.acceptance_rate,
        "identical": _identical(measurement.samples),
    }


def _section(samples: Sequence[Sample], *, wall_seconds: float | None = None) -> dict[str, Any]:
    """Sums over requests; a request's seconds are its median over the repeats."""
    runs: dict[str, list[Sample]] = {}
    for sample in samples:
        runs.setdefault(sample.prompt.id, []).append(sample)
    tokens = sum(len(run[0].output.token_ids) for run in runs.values())
    prefill_seconds = sum(median(sample.output.prefill_seconds for sample in run) for run in runs.values())
    decode_seconds = sum(median(sample.output.decode_seconds for sample in run) for run in runs.values())
    if wall_seconds is None:
        wall_seconds = sum(median(sample.seconds for sample in run) for run in runs.values())
    decoded = tokens - len(runs)  # the first token of a request is prefill's
    return {
        "requests": len(runs),
        "tokens": tokens,
        "wall_seconds": wall_seconds,
        "prefill_seconds": prefill_seconds,
        "decode_seconds": decode_seconds,
        "tokens_per_second": tokens / wall_seconds if wall_seconds else 0.0,
        "decode_tokens_per_second": decoded / decode_seconds if decode_seconds else 0.0,
    }


def _ratios(plain: dict[str, Any], speculative: dict[str, Any]) -> dict[str, float | None]:
    """Speculative over plain; None where a mode decoded nothing."""
    return {
        name: speculative[rate] / plain[rate] if plain[rate] else None
        for name, rate in (("speedup", "tokens_per_second"), ("decode_speedup", "decode_tokens_per_second"))
    }


def _rates(tokens: int, seconds: Sequence[float]) -> list[float]:
    """Tokens a second of each repeat; 0 for one that took no time."""
    return [tokens / taken if taken else 0.0 for taken in seconds]


def _speedups(rates: Mapping[Mode, Sequence[float]]) -> list[float]:
    """Of each repeat; none where one has no rate."""
    if not (all(rates["plain"]) and all(rates["speculative"])):
        return []
    return [after / before for before, after in zip(rates["plain"], rates["speculative"], strict=True)]


def _decode_speedups(samples: Sequence[Sample]) -> list[float]:
    rates: dict[Mode, list[float]] = {}
    for mode in MODES:
        runs: dict[str, list[Sample]] = {}
        for sample in samples:
            if sample.mode == mode:
                runs.setdefault(sample.prompt.id, []).append(sample)
        repeats = list(zip(*runs.values(), strict=True))
        tokens = sum(len(run[0].output.token_ids) - 1 for run in runs.values())
        rates[mode] = _rates(tokens, [sum(sample.output.decode_seconds for sample in own) for own in repeats])
    return _speedups(rates)


def _bound(speedup: float | None, repeats: Sequence[float]) -> float | None:
    """What a speed-up exceeds with 95% confidence: Student's bound for the mean of its repeats, in logarithms, but no
    more than the speed-up itself, which is of medians. None with fewer than three repeats."""
    count = len(repeats)
    if speedup is None or count < _LEAST_REPEATS:
        return None
    logs = [math.log(repeat) for repeat in repeats]
    return min(speedup, math.exp(fmean(logs) - _student(count - 1) * stdev(logs) / math.sqrt(count)))


def _student(freedom: int) -> float:
    """The 95th percentile of Student's t, by the expansion around the normal one (Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(0.95)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def _identical(samples: Sequence[Sample]) -> int:
    """Prompts whose ids agree in all runs of both modes."""
    ids: dict[str, set[tuple[int, ...]]] = {}
    for sample in samples:
        ids.setdefault(sample.prompt.id, set()).add(sample.output.token_ids)
    return sum(len(seen) == 1 for seen in ids.values())
