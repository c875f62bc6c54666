"""What a pass over m tokens costs, and a draft of n: the two prices that decide how much speculation can gain."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.control.passes import chain_pass, fill_context, greedy
from paceline.control.policy import FixedLength
from paceline.errors import ConfigError
from paceline.interfaces import Drafter, Runner
from paceline.params import SamplingParams
from paceline.types import Observation, RequestView

_REQUEST = "profile"
_PERIOD = 64  # the context repeats itself, so that prompt lookup finds something


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of one pass, or of one draft, over the repeats."""

    tokens: int  # of the pass; nodes of the draft
    ms: float  # median
    low_ms: float  # a quarter of the repeats took less
    high_ms: float  # a quarter took more


@dataclass(frozen=True, slots=True)
class DraftCost(Cost):
    """Of one draft."""

    budget: int  # nodes that were allowed


@dataclass(frozen=True, slots=True)
class Curve:
    """All costs of one run."""

    target: tuple[Cost, ...]
    draft: tuple[DraftCost, ...]


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
    in verification, and of drafts with each budget of `draft_tokens`, of which there are at most as many. One round of
    all of them is a repeat, so that they meet the same machine; `advance` is called after each round. The runner's K/V
    pool must be free: its contents are lost.

    Raises ConfigError where the context has no room, or where the drafter drafts nothing.
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
    drafts: list[_Proposal] = []
    if drafter is not None:
        drafter.consult(FixedLength(max(draft_tokens)))  # what a draft costs, not whether it pays
        view = _tell(drafter, known[:context], runner=runner)
        drafts = [_Proposal(drafter, view, budget) for budget in draft_tokens]
    pass_times, draft_times = _interleaved(passes, drafts, repeats=repeats, advance=advance)
    if drafter is not None:
        drafter.release(_REQUEST)
    return Curve(
        target=tuple(Cost(count, *_quartiles(times)) for count, times in zip(tokens, pass_times, strict=True)),
        draft=tuple(
            DraftCost(own.num_nodes, *_quartiles(times), own.budget)
            for own, times in zip(drafts, draft_times, strict=True)
        ),
    )


def _pass(runner: Runner, token_ids: np.ndarray, context: int) -> Callable[[], None]:
    """Always the same pass: it writes its K/V anew, and the context's stay as they are."""
    batch = chain_pass(token_ids, context=context, block_size=runner.kv.block_size)
    sampling = greedy(batch.positions.astype(np.uint32) + np.uint32(1))

    def forward() -> None:
        runner.forward(batch, sampling)

    return forward


@dataclass(slots=True)
class _Proposal:
    """Always the same draft after known tokens whose last one is pending. A draft model has the context's K/V from the
    warm-up, and one token to catch up with."""

    drafter: Drafter
    view: RequestView
    budget: int
    num_nodes: int = 0

    def __call__(self) -> None:
        [draft] = self.drafter.propose([self.view], [self.budget])
        if draft is None or not len(draft):
            raise ConfigError(
                f"the drafter {self.drafter.name} proposes nothing after {len(self.view.token_ids)} tokens: change "
                "--context, or leave it out with --speculation none."
            )
        self.num_nodes = len(draft)


def _tell(drafter: Drafter, token_ids: np.ndarray, *, runner: Runner) -> RequestView:
    """The drafter gets to know the context as a prompt of which the last token was still pending."""
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
    last = chain_pass(token_ids[-1:], context=known - 1, block_size=runner.kv.block_size, all_rows=False)
    hidden = runner.forward(replace(last, hidden_layers=drafter.hidden_layers)).hidden
    drafter.observe(Observation([view], [None], [None], hidden, last.query_starts, successors=[None]))
    return view


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


def _quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    median, low, high = np.percentile(times, (50, 25, 75)).tolist()
    return median, low, high
