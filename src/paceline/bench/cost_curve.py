"""What a pass over m tokens costs, and a draft of n: the two prices that decide how much speculation can gain."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.bench.passes import chain_pass, fill_context, greedy
from paceline.errors import ConfigError
from paceline.interfaces import Drafter, Runner
from paceline.types import RequestView, SamplingParams

_REQUEST = "profile"
_PERIOD = 64  # the context repeats itself, so that prompt lookup finds something


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of one pass, or of one draft, over the repeats."""

    tokens: int  # of the pass; of the draft, root excluded
    ms: float  # median
    low_ms: float  # a quarter of the repeats took less
    high_ms: float  # a quarter took more


@dataclass(frozen=True, slots=True)
class Curve:
    """All costs of one run."""

    target: tuple[Cost, ...]
    draft: tuple[Cost, ...]


def measure(
    runner: Runner,
    *,
    tokens: Sequence[int],
    context: int,
    repeats: int,
    drafter: Drafter | None = None,
    draft_tokens: Sequence[int] = (),
    advance: Callable[[], None] = lambda: None,
) -> Curve:
    """Costs of target passes over each number of `tokens` after `context` computed ones, every row sampled greedily as
    in verification, and of the drafter's `draft_tokens`, at most as many. One round of all of them is a repeat, so that
    they meet the same machine; `advance` is called after each round. The runner's K/V pool must be free: its contents
    are lost.

    Raises ConfigError where the context has no room, or where the drafter drafts less than it was asked for.
    """
    if context + max(tokens) > runner.max_model_len:
        raise ConfigError(
            f"--context {context} and a pass of {max(tokens)} tokens do not fit into the {runner.max_model_len} tokens "
            "that a sequence may hold: lower one of them."
        )
    rng = np.random.default_rng(0)
    repeated = rng.integers(0, runner.vocab_size, size=min(_PERIOD, context // 2 + 1), dtype=np.int32)
    known = np.resize(repeated, context + max(tokens))
    fill_context(runner, known[:context])
    passes = [_pass(runner, known[context : context + count], context) for count in tokens]
    drafts = [_draft(drafter, known[:context], count, runner=runner) for count in draft_tokens] if drafter else []
    pass_times, draft_times = _interleaved(passes, drafts, repeats=repeats, advance=advance)
    if drafter is not None:
        drafter.release(_REQUEST)
    return Curve(target=_costs(tokens, pass_times), draft=_costs(draft_tokens, draft_times))


def _pass(runner: Runner, token_ids: np.ndarray, context: int) -> Callable[[], None]:
    """Always the same pass: it writes its K/V anew, and the context's stay as they are."""
    batch = chain_pass(token_ids, context=context, block_size=runner.kv.block_size)
    sampling = greedy(batch.positions.astype(np.uint32) + np.uint32(1))

    def forward() -> None:
        runner.forward(batch, sampling)

    return forward


def _draft(drafter: Drafter, token_ids: np.ndarray, count: int, *, runner: Runner) -> Callable[[], None]:
    """Always the same draft after known tokens whose last one is pending. A draft model has the context's K/V from the
    warm-up, and one token to catch up with."""
    known = len(token_ids)
    view = RequestView(
        _REQUEST,
        token_ids,
        known,
        SamplingParams(),
        seed=0,
        stream=0,
        attempt=0,
        num_computed=known - 1,
        block_table=np.arange(runner.kv.num_blocks, dtype=np.int32),
    )

    def propose() -> None:
        [draft] = drafter.propose([view], [count])
        if draft is None or len(draft) < count:
            found = 0 if draft is None else len(draft)
            raise ConfigError(
                f"the drafter {drafter.name} proposes {found} of {count} tokens after {len(token_ids)}: change "
                "--context, or leave it out with --speculation none."
            )

    return propose


def _interleaved(
    passes: Sequence[Callable[[], None]],
    drafts: Sequence[Callable[[], None]],
    *,
    repeats: int,
    advance: Callable[[], None],
) -> tuple[list[list[float]], list[list[float]]]:
    """Milliseconds of each pass and of each draft in each repeat, after a round to warm up.

    A draft is made right after a pass, as in decoding: what it reads has left the caches. Every second round runs
    backwards.
    """
    pass_times: list[list[float]] = [[] for _ in passes]
    draft_times: list[list[float]] = [[] for _ in drafts]
    for repeat in range(-1, repeats):
        for index in range(len(passes)) if repeat % 2 == 0 else reversed(range(len(passes))):
            pass_times[index].append(_milliseconds(passes[index]))
            if index < len(drafts):
                draft_times[index].append(_milliseconds(drafts[index]))
        if repeat >= 0:
            advance()
    return [times[1:] for times in pass_times], [times[1:] for times in draft_times]


def _milliseconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _costs(counts: Sequence[int], times: Sequence[Sequence[float]]) -> tuple[Cost, ...]:
    quartiles = np.percentile(np.reshape(times, (len(counts), -1)), (50, 25, 75), axis=1).T if counts else ()
    return tuple(Cost(count, *map(float, own)) for count, own in zip(counts, quartiles, strict=True))
