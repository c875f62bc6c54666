"""What drafting with some layers costs beside a target pass, and the speed-up that follows from an agreement."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from paceline.control.passes import chain_pass, fill_context, greedy
from paceline.interfaces import Runner

_CONTEXT = 128  # tokens before each pass
_REPEATS = 12
LONGEST_DRAFT = 4  # so many tokens, and agreement is measured over windows of so many


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """In units of a target pass over one token."""

    passes: tuple[float, ...]  # of target passes over 1, 2, .. tokens
    fixed: float  # of a draft pass over no layer: embedding, norm, head, sampling
    layer: float  # of each layer in it

    def speedup(self, agreement: float, *, num_layers: int) -> tuple[float, int]:
        """Decoding's over plain with drafts by num_layers layers that are right with this probability; the draft
        length at which it is highest, 1 at least.

        A draft of k tokens yields 1 + a + .. + a^k tokens.
        """
        draft = self.fixed + num_layers * self.layer
        lengths = range(1, len(self.passes))
        return max((sum(agreement**j for j in range(k + 1)) / (k * draft + self.passes[k]), k) for k in lengths)


def measure_costs(runner: Runner, *, num_layers: int) -> LayerCosts:
    """Medians over rounds, each in units of its own one-token pass, so that a machine whose speed changes does little
    harm. The contents of the runner's K/V pool are lost."""
    ids = np.random.default_rng(0).integers(0, runner.vocab_size, size=_CONTEXT + LONGEST_DRAFT + 1, dtype=np.int32)
    fill_context(runner, ids[:_CONTEXT])

    def timed(count: int, layers: tuple[int, ...] | None) -> Callable[[], float]:
        batch = chain_pass(ids[_CONTEXT : _CONTEXT + count], context=_CONTEXT, block_size=runner.kv.block_size)
        batch = replace(batch, layers=layers)
        sampling = greedy(batch.positions.astype(np.uint32) + np.uint32(1))

        def seconds() -> float:
            start = time.perf_counter()
            runner.forward(batch, sampling)
            return time.perf_counter() - start

        return seconds

    calls = [timed(count, None) for count in range(1, LONGEST_DRAFT + 2)] + [timed(1, (0,))]
    rounds = np.array([[call() for call in calls] for _ in range(_REPEATS + 1)])[1:]  # the first warms up
    *passes, one_layer = np.median(rounds / rounds[:, :1], axis=0).tolist()
    layer = max(0.0, 1.0 - one_layer) / (num_layers - 1)
    return LayerCosts(passes=tuple(passes), fixed=max(0.0, one_layer - layer), layer=layer)
