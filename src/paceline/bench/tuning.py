"""Whether speculation pays on a user's own prompts: `auto` against fixed draft lengths, and over batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline import costs
from paceline.bench.report import summarize
from paceline.bench.runner import MODES, engines, measure
from paceline.bench.workload import Prompt
from paceline.config import EngineConfig, SpeculationConfig
from paceline.control.cost import PassCosts
from paceline.interfaces import Controller, Drafter
from paceline.params import SamplingParams
from paceline.types import Draft, Load, Observation, RequestView, SpeculationMetrics

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models.loader import LoadedModel

_CLEARLY = 1.03  # by which a fixed length must beat auto to be recommended: less is noise


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run the prompts. length: nodes of a draft at most; None = as many as pay."""

    length: int | None
    concurrency: int

    @property
    def name(self) -> str:
        length = "auto" if self.length is None else f"{self.length} nodes"
        return length if self.concurrency == 1 else f"{length}, {self.concurrency} at once"


@dataclass(frozen=True, slots=True)
class Trial:
    """What a setting brought, as `paceline bench` would say, and what measured costs foretold of it."""

    setting: Setting
    report: dict[str, Any]
    predicted_speedup: float  # of what `speedup` is of
    accepted_per_position: tuple[float, ...]  # of all drafts, those whose position i was accepted
    acceptance_lengths: dict[str, float]  # by category

    @property
    def speedup(self) -> float:
        """Of decoding; of several requests at once, of their throughput."""
        name = "decode_speedup" if self.setting.concurrency == 1 else "speedup"
        return self.report[name] or 1.0


def settings(lengths: Sequence[int], batches: Sequence[int]) -> list[Setting]:
    """auto and each length alone, and auto for each further number of requests at once."""
    alone = [Setting(None, 1), *(Setting(length, 1) for length in lengths)]
    return alone + [Setting(None, batch) for batch in batches if batch > 1]


def num_requests(chosen: Sequence[Setting], prompts: Sequence[Prompt], repeats: int) -> int:
    """Requests that `run` makes, for a progress bar."""
    return len(chosen) * len(MODES) * repeats * len(prompts)


def run(
    model: LoadedModel,
    config: EngineConfig,
    setting: Setting,
    prompts: Sequence[Prompt],
    *,
    params: SamplingParams,
    repeats: int,
    advance: Callable[[], None] = lambda: None,
) -> Trial:
    """Runs the prompts plainly and speculatively, interleaved, on engines of their own."""
    own = replace(
        config,
        speculation=_speculation(config.speculation, setting),
        scheduler=replace(config.scheduler, max_num_seqs=setting.concurrency),
    )
    forecasts: list[Forecast] = []

    def followed() -> Iterator[LLM]:
        for llm in engines(model, own, repeats=repeats):
            assert llm.engine.drafting is not None
            forecasts.append(Forecast(llm.engine.drafting.controller, costs.of(model, llm.config, llm.runner)))
            llm.engine.drafting.control(forecasts[-1])
            yield llm
            del llm  # its memory, before the next one takes its own

    at_once = setting.concurrency > 1
    measurement = measure(followed(), prompts, params=params, at_once=at_once, observe=lambda _: advance())
    by_category: dict[str, SpeculationMetrics] = {}
    for sample in measurement.samples:
        if sample.mode == "speculative":
            before = by_category.get(sample.prompt.category, SpeculationMetrics())
            by_category[sample.prompt.category] = before + sample.output.metrics
    metrics = sum(by_category.values(), SpeculationMetrics())
    per_position = tuple(count / max(1, metrics.num_drafts) for count in metrics.num_accepted_tokens_per_pos)
    lengths = {category: own.acceptance_length for category, own in by_category.items()}
    predicted = median(forecast.throughput_speedup if at_once else forecast.speedup for forecast in forecasts)
    return Trial(setting, summarize(measurement), predicted, per_position, lengths)


def best_fixed(trials: Sequence[Trial]) -> Trial:
    """The fixed length that decoded fastest."""
    alone = [trial for trial in trials if trial.setting.length is not None]
    return max(alone, key=lambda trial: trial.speedup)


def break_even(trials: Sequence[Trial]) -> int | None:
    """The number of requests at once from which on speculation brought nothing; None = it brought something at most."""
    auto = sorted((t for t in trials if t.setting.length is None), key=lambda trial: -trial.setting.concurrency)
    idle = [trial.setting.concurrency for trial in takewhile(lambda trial: trial.speedup <= 1.0, auto)]
    return min(idle, default=None)


def recommended(trials: Sequence[Trial]) -> dict[str, Any] | str:
    """What decoded fastest alone: auto unless a fixed length was clearly better, none if nothing paid."""
    auto = next(trial for trial in trials if trial.setting == Setting(None, 1))
    best = best_fixed(trials)
    if best.speedup > _CLEARLY * max(1.0, auto.speedup):
        return {"control": "fixed", "num_speculative_tokens": best.setting.length}
    return {"control": "auto"} if auto.speedup > 1.0 else "none"


def _speculation(rule: SpeculationConfig, setting: Setting) -> SpeculationConfig:
    if setting.length is None:
        return replace(rule, control="auto")
    return replace(rule, control="fixed", num_speculative_tokens=setting.length)


class Forecast(Controller):
    """Does what another controller does, and adds up what passes with drafts should take, and plain ones instead."""

    def __init__(self, controller: Controller, costs: PassCosts) -> None:
        self.fixed = controller.fixed
        self._controller = controller
        self._costs = costs
        self._load = Load(0, 0)
        self._drafting_seconds = 0.0
        self.plain_seconds = 0.0  # of plain passes for the same tokens
        self.seconds = 0.0  # of the passes as they are, and of drafting
        self.prompt_seconds = 0.0  # by the clock, of passes with a prompt's tokens in them

    @property
    def rest(self) -> int:
        return self._controller.rest

    @property
    def least_reach(self) -> float:
        return self._controller.least_reach

    @property
    def speedup(self) -> float:
        """Of decoding, by the costs."""
        return self.plain_seconds / self.seconds if self.seconds else 1.0

    @property
    def throughput_speedup(self) -> float:
        """The same with the prompts' passes, which are as many."""
        seconds = self.seconds + self.prompt_seconds
        return (self.plain_seconds + self.prompt_seconds) / seconds if seconds else 1.0

    def plan(self, views: Sequence[RequestView], limits: Sequence[int], load: Load) -> list[int]:
        self._load, self._drafting_seconds = load, 0.0
        return self._controller.plan(views, limits, load)

    def budgets(
        self, drafter: Drafter, views: Sequence[RequestView], limits: Sequence[int], drafts: Sequence[Sequence[Draft]]
    ) -> list[int]:
        return self._controller.budgets(drafter, views, limits, drafts)

    def drafted(
        self, drafter: Drafter, views: Sequence[RequestView], drafts: Sequence[Draft | None], *, seconds: float
    ) -> None:
        self._controller.drafted(drafter, views, drafts, seconds=seconds)

    def select(
        self, views: Sequence[RequestView], drafts: Sequence[Draft | None], load: Load, *, seconds: float
    ) -> list[Draft | None]:
        self._drafting_seconds = seconds
        return self._controller.select(views, drafts, load, seconds=seconds)

    def observe(self, step: Observation) -> None:
        self._controller.observe(step)
        load = self._load
        if not load.only_decodes:
            self.prompt_seconds += step.seconds
            return
        nodes, keys = step.nodes_and_keys
        plain = self._costs.seconds(load.rows, load.keys, load.keys)
        num_tokens = sum(len(step.emitted(i)) for i in range(len(step.views)))
        self.plain_seconds += plain * num_tokens / load.num_sequences
        self.seconds += self._costs.seconds(load.rows + nodes, load.keys + keys, load.keys)
        self.seconds += self._drafting_seconds

    def passed(self, load: Load, seconds: float) -> None:
        self._controller.passed(load, seconds)
        if not load.only_decodes:
            self.prompt_seconds += seconds
            return
        plain = self._costs.seconds(load.rows, load.keys, load.keys)
        self.plain_seconds += plain
        self.seconds += plain

    def release(self, request_id: str) -> None:
        self._controller.release(request_id)
