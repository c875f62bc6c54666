"""Runs a workload plainly and speculatively, interleaved, so that both meet the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from paceline.bench.turns import Turns
from paceline.bench.workload import Prompt
from paceline.config import EngineConfig, SpeculationConfig
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
    """All samples, and the wall time of each mode in each repeat; of requests at once that of its turns."""

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


def without_drafter(llm: LLM) -> LLM:
    """An engine for plain runs beside one that drafts: the same weights in memory, a K/V cache of its own, as large."""
    from paceline.llm import LLM

    kv = llm.runner.kv
    cache = replace(llm.config.cache, kv_cache_memory=kv.num_blocks * kv.bytes_per_block)
    config = replace(llm.config, cache=cache, speculation=SpeculationConfig(method="none"))
    return LLM(llm, config=config, progress=False)


def measure(
    llms: Iterable[LLM],
    prompts: Sequence[Prompt],
    *,
    params: SamplingParams,
    at_once: bool = False,
    announce: Callable[[Prompt, Mode], None] = lambda prompt, mode: None,
    observe: Callable[[Sample], None] = lambda sample: None,
) -> Measurement:
    """Each prompt in both modes, once with each engine and one without a drafter beside it, after a short warm-up.

    One request at a time the modes alternate prompt by prompt, and so does which goes first. at_once: all prompts are
    handed in at once to both engines, which take turns. `announce` is told what single request is next, `observe` of
    each finished one; the warm-up is neither's.
    """
    samples: list[Sample] = []

    def note(sample: Sample) -> None:
        samples.append(sample)
        observe(sample)

    wall_seconds: dict[Mode, list[float]] = {mode: [] for mode in MODES}
    for llm in llms:
        swapped = len(wall_seconds["plain"]) % 2 == 1
        both: dict[Mode, LLM] = {"plain": without_drafter(llm), "speculative": llm}
        for mode in MODES:
            warm_up = replace(params, max_tokens=min(8, params.max_tokens), min_tokens=0)
            submit(both[mode], [_WARM_UP], warm_up, mode=mode)
        if at_once:
            seconds = _at_once(both, prompts, params, swapped=swapped, note=note)
        else:
            seconds = _one_by_one(both, prompts, params, swapped=swapped, announce=announce, note=note)
        for mode in MODES:
            wall_seconds[mode].append(seconds[mode])
        del llm, both  # its memory, before the next one takes its own
    return Measurement(tuple(samples), {mode: tuple(seconds) for mode, seconds in wall_seconds.items()})


def _one_by_one(
    llms: Mapping[Mode, LLM],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    swapped: bool,
    announce: Callable[[Prompt, Mode], None],
    note: Callable[[Sample], None],
) -> dict[Mode, float]:
    """Wall seconds of each mode."""
    wall_seconds: dict[Mode, float] = dict.fromkeys(MODES, 0.0)
    for index, prompt in enumerate(prompts):
        for mode in reversed(MODES) if (index % 2 == 1) != swapped else MODES:
            announce(prompt, mode)
            start = time.perf_counter()
            [output] = submit(llms[mode], [prompt], params, mode=mode)
            elapsed = time.perf_counter() - start
            wall_seconds[mode] += elapsed
            note(Sample(prompt, mode, output, elapsed))
    return wall_seconds


def _at_once(
    llms: Mapping[Mode, LLM],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    swapped: bool,
    note: Callable[[Sample], None],
) -> dict[Mode, float]:
    """Seconds that each mode's turns took."""
    turns: dict[Mode, Turns] = {
        mode: Turns(llms[mode], prompts, params) for mode in (reversed(MODES) if swapped else MODES)
    }
    while not all(own.finished for own in turns.values()):
        for mode, own in turns.items():
            for prompt, output in own.take():
                note(Sample(prompt, mode, output, output.prefill_seconds + output.decode_seconds))
    return {mode: own.seconds for mode, own in turns.items()}
