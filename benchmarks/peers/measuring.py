"""How every system is measured: the same clock, the same order, the same fields. Needs the standard library only."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

PREFILL_REPEATS = 3
CHUNK_TOKENS = 512  # of a text whose perplexity is taken
PASS_SIZES = (1, 2, 4, 8, 16)
PASS_CONTEXT = 256  # tokens before those of the pass
PASS_REPEATS = 12


class Output(NamedTuple):
    """What a system says of one request."""

    ids: list[int]  # new tokens, an end-of-text token included
    prefill_seconds: float  # to the first token
    seconds: float  # of the whole request


Generate = Callable[[list[int], int], Output]  # (prompt ids, tokens at most), greedy


def measure(workload: dict[str, Any], generate: Generate) -> dict[str, Any]:
    """Prefill of a long prompt, which warms the system up as well, then all prompts, one at a time."""
    prefill_tokens_per_second = measure_prefill(workload["prefill_ids"], generate)
    outputs = [generate(prompt["ids"], workload["max_tokens"]) for prompt in workload["prompts"]]
    by_category: dict[str, list[Output]] = {}
    for prompt, output in zip(workload["prompts"], outputs, strict=True):
        by_category.setdefault(prompt["category"], []).append(output)
    return {
        **section(outputs),
        "by_category": {category: section(own) for category, own in by_category.items()},
        "prefill_tokens_per_second": prefill_tokens_per_second,
        "outputs": [output.ids for output in outputs],
    }


def measure_prefill(ids: list[int], generate: Generate) -> float:
    """Tokens per second of a request for one token. Each run begins with another token: no prefix cache can help."""
    seconds = []
    for turn in range(PREFILL_REPEATS + 1):
        seconds.append(generate(ids[turn:] + ids[:turn], 1).seconds)
    return len(ids) / median(seconds[1:])  # the first was the warm-up


def section(outputs: Sequence[Output]) -> dict[str, Any]:
    """The fields of a `paceline bench` section."""
    tokens = sum(len(output.ids) for output in outputs)
    wall_seconds = sum(output.seconds for output in outputs)
    prefill_seconds = sum(output.prefill_seconds for output in outputs)
    decode_seconds = wall_seconds - prefill_seconds
    decoded = tokens - len(outputs)  # the first token of a request is prefill's
    return {
        "requests": len(outputs),
        "tokens": tokens,
        "wall_seconds": wall_seconds,
        "prefill_seconds": prefill_seconds,
        "decode_seconds": decode_seconds,
        "tokens_per_second": tokens / wall_seconds,
        "decode_tokens_per_second": decoded / decode_seconds if decoded else 0.0,
    }


def pass_milliseconds(run: Callable[[int], None]) -> dict[str, float]:
    """Median cost of run(m), a pass over m tokens after PASS_CONTEXT others, by m; sizes alternate."""
    seconds: dict[int, list[float]] = {size: [] for size in PASS_SIZES}
    for _ in range(PASS_REPEATS):
        for size, own in seconds.items():
            start = time.perf_counter()
            run(size)
            own.append(time.perf_counter() - start)
    return {str(size): 1e3 * median(own[1:]) for size, own in seconds.items()}  # the first was the warm-up


def perplexity(ids: list[int], log_likelihood: Callable[[list[int]], float]) -> dict[str, Any]:
    """Over whole chunks of CHUNK_TOKENS, each on its own, its first token given.

    log_likelihood: the sum of log p over the tokens of a chunk, from the second on.
    """
    starts = range(0, len(ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS)
    if not starts:
        raise SystemExit(f"error: the text has {len(ids)} tokens, less than one chunk of {CHUNK_TOKENS}: give more.")
    tokens = len(starts) * (CHUNK_TOKENS - 1)
    total = sum(log_likelihood(ids[start : start + CHUNK_TOKENS]) for start in starts)
    return {"tokens": tokens, "perplexity": math.exp(-total / tokens)}
