"""What `paceline bench` says of a measurement: medians over repeats, sums over requests, ratios of the modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from paceline.bench.runner import MODES, Measurement, Mode, Sample
from paceline.types import SpeculationMetrics

_LEAST_REPEATS = 3  # for a bound
_DRAWS = 2000


def summarize(measurement: Measurement) -> dict[str, Any]:
    """The JSON of `paceline bench`, but for model, settings and environment.

    `speedup` compares whole requests (wall time), `decode_speedup` the time from the first output token to the last.
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
    plain_wall, speculative_wall = (np.array([measurement.wall_seconds[mode]]) for mode in MODES)
    return report | {
        **_ratios(plain, speculative),
        "speedup_range": _range(plain["tokens"], speculative["tokens"], measurement.wall_seconds),
        "speedup_bound": _bound(plain_wall, speculative_wall, speculative["tokens"] / plain["tokens"]),
        "decode_speedup_bound": _decode_bound(measurement.samples),
        "by_category": {
            category: {
                **_ratios(plain["by_category"][category], speculative["by_category"][category]),
                "decode_speedup_bound": _decode_bound(own),
            }
            for category, own in by_category.items()
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


def _decode_bound(samples: Sequence[Sample]) -> float | None:
    """Of `decode_speedup`; None where a mode decoded nothing."""
    seconds: dict[Mode, dict[str, list[float]]] = {mode: {} for mode in MODES}
    tokens = dict.fromkeys(MODES, 0)
    for sample in samples:
        tokens[sample.mode] += len(sample.output.token_ids) - 1
        seconds[sample.mode].setdefault(sample.prompt.id, []).append(sample.output.decode_seconds)
    if not all(tokens.values()):
        return None
    plain, speculative = (np.array(list(seconds[mode].values())) for mode in MODES)
    return _bound(plain, speculative, tokens["speculative"] / tokens["plain"])


def _bound(plain: np.ndarray, speculative: np.ndarray, tokens: float) -> float | None:
    """What a speed-up exceeds with 95% confidence, as the repeats tell: their bootstrap, each request's drawn on its
    own, the two modes of a repeat together. None with fewer than three repeats.

    plain, speculative: seconds [requests, repeats]; tokens: speculative over plain.
    """
    count, repeats = plain.shape
    if repeats < _LEAST_REPEATS or not (plain.any() and speculative.any()):
        return None
    drawn = np.random.default_rng(0).integers(0, repeats, size=(_DRAWS, count, repeats))
    before, after = (np.take_along_axis(own[None], drawn, axis=2) for own in (plain, speculative))
    ratios = np.median(before, axis=2).sum(axis=1) / np.median(after, axis=2).sum(axis=1)
    return float(np.percentile(ratios * tokens, 5))


def _identical(samples: Sequence[Sample]) -> int:
    """Prompts whose ids agree in all runs of both modes."""
    ids: dict[str, set[tuple[int, ...]]] = {}
    for sample in samples:
        ids.setdefault(sample.prompt.id, set()).add(sample.output.token_ids)
    return sum(len(seen) == 1 for seen in ids.values())
