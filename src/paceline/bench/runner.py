"""Runs a workload plainly and speculatively, interleaved in one engine, so that both meet the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from paceline.bench.workload import Prompt
from paceline.config import EngineConfig
from paceline.params import SamplingParams
from paceline.types import RequestOutput

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models.loader import LoadedModel

Mode = Literal["plain", "speculative"]
MODES: tuple[Mode, Mode] = ("plain", "speculative")
_WARM_UP = Prompt("warm-up", "", ("Count to eight.",))  # none of the prompts, which drafters would remember


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of one run."""

    prompt: Prompt
    mode: Mode
    output: RequestOutput
    seconds: float  # the call's wall time, one request at a time; otherwise the request's own prefill and decoding


@dataclass(frozen=True, slots=True)
class Measurement:
    """All samples, and the wall time of each mode in each repeat."""

    samples: tuple[Sample, ...]
    wall_seconds: dict[Mode, tuple[float, ...]]


def submit(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, *, mode: Mode) -> list[RequestOutput]:
    """The prompts at once, under the chat template where the model has one; plain switches drafting off."""
    params = replace(params, speculation=mode == "speculative")
    if not llm.tokenizer.has_chat_template:
        return llm.generate([prompt.turns[0] for prompt in prompts], params)
    return llm.chat([prompt.messages for prompt in prompts], params)


def engines(model: LoadedModel, config: EngineConfig, *, repeats: int) -> Iterator[LLM]:
    """One after another, for `measure`: nothing that a drafter remembers of one repeat helps the next.

    They are not closed: drafters that keep a file read it, and leave it as it is.
    """
    from paceline.llm import LLM

    for _ in range(repeats):
        yield LLM(model, config=config, progress=False)  # no name, which would keep it while the next one is made


def measure(
    llms: Iterable[LLM],
    prompts: Sequence[Prompt],
    *,
    params: SamplingParams,
    concurrency: int = 1,
    announce: Callable[[Sequence[Prompt], Mode], None] = lambda prompts, mode: None,
    observe: Callable[[Sample], None] = lambda sample: None,
) -> Measurement:
    """Each prompt in both modes, once with each engine, after a short warm-up.

    `announce` is told what is submitted next, `observe` of each finished request; the warm-up is neither's.
    One request at a time the modes alternate prompt by prompt; with concurrency (the engine's max_num_seqs) all
    prompts of a mode are handed in at once. Which mode goes first alternates too.
    """
    batches = [[prompt] for prompt in prompts] if concurrency == 1 else [list(prompts)]
    samples: list[Sample] = []
    wall_seconds: dict[Mode, list[float]] = {mode: [] for mode in MODES}
    for llm in llms:
        repeat = len(wall_seconds["plain"])
        for mode in MODES:
            submit(llm, [_WARM_UP], replace(params, max_tokens=min(8, params.max_tokens), min_tokens=0), mode=mode)
            wall_seconds[mode].append(0.0)
        for index, batch in enumerate(batches):
            for mode in MODES if (index + repeat) % 2 == 0 else reversed(MODES):
                announce(batch, mode)
                start = time.perf_counter()
                outputs = submit(llm, batch, params, mode=mode)
                elapsed = time.perf_counter() - start
                wall_seconds[mode][repeat] += elapsed
                for prompt, output in zip(batch, outputs, strict=True):
                    own = output.prefill_seconds + output.decode_seconds
                    samples.append(Sample(prompt, mode, output, elapsed if concurrency == 1 else own))
                    observe(samples[-1])
        del llm  # its memory, before the next one takes its own
    return Measurement(tuple(samples), {mode: tuple(seconds) for mode, seconds in wall_seconds.items()})
