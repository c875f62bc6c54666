"""How far `auto` is from the best fixed draft length of each category, chosen in hindsight, in simulated time.

usage: regret.py [--model M] [--prompts F] [--per-category N] [--max-tokens N] [--lengths N ...] [--draft-ms X]
The engine and its drafters run for real, all on one cost curve, measured at the start; passes count as long as that
curve says, and a draft takes --draft-ms. So the neighbours of a shared machine change nothing, and lengths can be
compared to the percent. Each length, and auto, runs all prompts in order in an engine of its own; plain decoding is a
choice, too. Renews results/regret-MODEL.json and its table in docs/drafters.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from results_file import keep, name_of, renew

from paceline.bench.environment import describe_environment
from paceline.bench.runner import submit
from paceline.bench.tuning import Forecast
from paceline.bench.workload import Prompt, read_prompts, select
from paceline.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from paceline.control.cost import PassCosts, measure
from paceline.control.policy import CostPolicy, FixedLength
from paceline.interfaces import Controller, Drafter
from paceline.llm import LLM
from paceline.models.loader import LoadedModel, load
from paceline.params import SamplingParams
from paceline.types import Draft, Load, Observation, RequestView

HERE = Path(__file__).parent
MAX_NODES = 16


class FrozenCosts(PassCosts):
    """Costs that no clock corrects."""

    def observe(self, rows: int, keys: int, contexts: int, seconds: float) -> None:
        pass


class SimulatedTime(Forecast):
    """A forecast in which passes take what they cost and drafts always the same, for the controller, too."""

    def __init__(self, controller: Controller, costs: PassCosts, *, draft_seconds: float) -> None:
        super().__init__(controller, costs)
        self._draft_seconds = draft_seconds

    def drafted(
        self, drafter: Drafter, views: Sequence[RequestView], drafts: Sequence[Draft | None], *, seconds: float
    ) -> None:
        pass  # select tells of all drafters together

    def select(
        self, views: Sequence[RequestView], drafts: Sequence[Draft | None], load: Load, *, seconds: float
    ) -> list[Draft | None]:
        return super().select(views, drafts, load, seconds=self._draft_seconds)

    def observe(self, step: Observation) -> None:
        (nodes, keys), load = step.nodes_and_keys, self._load
        super().observe(replace(step, seconds=self._costs.seconds(load.rows + nodes, load.keys + keys, load.keys)))

    def passed(self, load: Load, seconds: float) -> None:
        super().passed(load, self._costs.seconds(load.rows, load.keys, load.keys))


def speedups(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    costs: PassCosts,
    *,
    length: int | None,
    draft_seconds: float,
    params: SamplingParams,
) -> dict[str, float]:
    """Decode speed-up of each category; length: None = auto."""
    llm = LLM(model, config=config(length), progress=False)
    drafting = llm.engine.drafting
    assert drafting is not None
    controller = CostPolicy(costs) if length is None else FixedLength(length)
    clock = SimulatedTime(controller, costs, draft_seconds=draft_seconds)
    drafting.control(clock)
    sums: dict[str, tuple[float, float]] = {}
    for prompt in prompts:
        before = clock.plain_seconds, clock.seconds
        submit(llm, [prompt], params, mode="speculative")
        plain, own = sums.get(prompt.category, (0.0, 0.0))
        sums[prompt.category] = plain + clock.plain_seconds - before[0], own + clock.seconds - before[1]
    total = tuple(map(sum, zip(*sums.values(), strict=True)))
    return {"all": total[0] / total[1], **{name: plain / own for name, (plain, own) in sums.items()}}


def config(length: int | None) -> EngineConfig:
    """Of an engine for one request at a time, with drafts of a fixed length or auto's."""
    control = "auto" if length is None else "fixed"
    speculation = SpeculationConfig(
        method="auto", num_speculative_tokens=MAX_NODES if length is None else length, control=control
    )
    cache = CacheConfig(prefix_caching=False)
    return EngineConfig(cache=cache, scheduler=SchedulerConfig(max_num_seqs=1), speculation=speculation)


def regrets(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """Of each category: how much longer decoding takes under auto than at the best fixed length."""
    fixed = [own for name, own in found.items() if name != "auto"]
    return {name: max(own[name] for own in fixed) / auto - 1 for name, auto in found["auto"].items()}


def render(results: dict[str, Any]) -> str:
    """A Markdown table."""
    found, own, environment = results["speedups"], results["settings"], results["environment"]
    names = list(found["auto"])
    lines = [
        f"{results['model']}: decode speed-up in simulated time, by the cost curve of {environment['cpu']}, "
        f"{environment['cores']} cores (a pass over 2, 4, 8, 16 rows: {own['curve']}), {own['draft_ms']} ms a draft; "
        f"{own['prompts']} prompts, greedy, {own['max_tokens']} new tokens.",
        "",
        f"| nodes at most | {' | '.join(names)} |",
        "|---" * (1 + len(names)) + "|",
        *(f"| {name} | {' | '.join(f'{own[key]:.2f}x' for key in names)} |" for name, own in found.items()),
        f"| time over the best of each | {' | '.join(f'{value:+.1%}' for value in regrets(found).values())} |",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", default=str(HERE / "prompts.jsonl"))
    parser.add_argument("--per-category", type=int)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1, 2, 4, 8, 12, 16])
    parser.add_argument("--draft-ms", type=float, default=0.25)
    arguments = parser.parse_args()
    prompts = select(read_prompts(arguments.prompts), per_category=arguments.per_category)
    model = load(arguments.model)
    params = SamplingParams(max_tokens=arguments.max_tokens)
    plain = replace(config(None), speculation=SpeculationConfig(method="none"))
    curve = FrozenCosts.from_json(measure(LLM(model, config=plain).runner, max_rows=1 + MAX_NODES).as_json())
    found = {}
    for length in (None, *arguments.lengths):
        name = "auto" if length is None else str(length)
        seconds = arguments.draft_ms / 1e3
        found[name] = speedups(model, prompts, curve, length=length, draft_seconds=seconds, params=params)
        print(name, {key: round(value, 3) for key, value in found[name].items()}, flush=True)
    found["plain"] = dict.fromkeys(found["auto"], 1.0)
    results = {
        "model": f"{arguments.model}, {model.precision}",
        "settings": {
            "prompts": len(prompts),
            "max_tokens": arguments.max_tokens,
            "draft_ms": arguments.draft_ms,
            "curve": ", ".join(f"{curve.seconds(rows) / curve.seconds(1):.2f}x" for rows in (2, 4, 8, 16)),
        },
        "environment": describe_environment(),
        "speedups": found,
    }
    name = f"regret-{name_of(arguments.model)}"
    keep(results, name)
    renew("docs/drafters.md", render(results), name=name)
    print(render(results))


if __name__ == "__main__":
    main()
