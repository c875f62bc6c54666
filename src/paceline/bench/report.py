"""What `paceline bench` says of a measurement: medians over repeats, sums over requests, ratios of the modes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, median, stdev
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
    walls = measurement.wall_seconds
    return report | {
        **ratios,
        "speedup_range": _range(plain["tokens"], speculative["tokens"], walls),
        "speedup_bound": _bound(ratios["speedup"], walls["plain"], walls["speculative"]),
        "decode_speedup_bound": _decode_bound(measurement.samples, ratios["decode_speedup"]),
        "by_category": {
            category: {**own, "decode_speedup_bound": _decode_bound(by_category[category], own["decode_speedup"])}
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


def _range(plain_tokens: int, tokens: int, wall_seconds: Mapping[Mode, Sequence[float]]) -> tuple[float, float] | None:
    """The least and the greatest `speedup` of a single repeat; None with one repeat, which tells nothing of others."""
    pairs = zip(wall_seconds["plain"], wall_seconds["speculative"], strict=True)
    ratios = [tokens / seconds / (plain_tokens / plain_seconds) for plain_seconds, seconds in pairs]
    return (min(ratios), max(ratios)) if len(ratios) > 1 else None


def _decode_bound(samples: Sequence[Sample], speedup: float | None) -> float | None:
    """Of `decode_speedup`."""
    seconds: dict[Mode, dict[str, list[float]]] = {mode: {} for mode in MODES}
    for sample in samples:
        seconds[sample.mode].setdefault(sample.prompt.id, []).append(sample.output.decode_seconds)
    plain, speculative = ([sum(repeat) for repeat in zip(*seconds[mode].values(), strict=True)] for mode in MODES)
    return _bound(speedup, plain, speculative)


def _bound(speedup: float | None, plain: Sequence[float], speculative: Sequence[float]) -> float | None:
    """What a speed-up exceeds with 95% confidence: by as much below it as Student's bound for the mean of the repeats
    is below that mean, in logarithms. None with fewer than three repeats, or where a mode took no time.

    plain, speculative: seconds of each repeat.
    """
    count = len(plain)
    if speedup is None or count < _LEAST_REPEATS or not (all(plain) and all(speculative)):
        return None
    logs = [math.log(before / after) for before, after in zip(plain, speculative, strict=True)]
    return speedup * math.exp(-_student(count - 1) * stdev(logs) / math.sqrt(count))


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
