"""Do drafted nodes come true as often as `auto` thinks? Renews results/reliability-MODEL.json.

usage: reliability.py [--model M] [--prompts F] [--per-category N] [--max-tokens N]
Greedy and at temperature 0.8. Every node that the text could judge counts, verified or not: what its drafter claimed,
what control/acceptance.py made of that before the outcome was known, and the outcome. performance_page.py draws it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from results_file import keep, name_of

from paceline.bench.environment import describe_environment
from paceline.bench.runner import submit
from paceline.bench.workload import read_prompts, select
from paceline.config import CacheConfig, EngineConfig, SchedulerConfig
from paceline.control.acceptance import Acceptance
from paceline.control.policy import CostPolicy
from paceline.llm import LLM
from paceline.models.loader import load
from paceline.params import SamplingParams
from paceline.types import Draft

HERE = Path(__file__).parent
BINS = 10


class Witness(Acceptance):
    """Writes down of each judged node what was claimed, what was thought, and whether it came true."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float, bool]] = []

    def observe(self, request_id: str, draft: Draft, emitted: Sequence[int]) -> None:
        reach = self.reach(request_id, draft)
        parents = draft.parents.tolist()
        for node, _, right in draft.judged(emitted):
            above = reach[parents[node]] if parents[node] >= 0 else 1.0
            self.seen.append((draft.claims[node], reach[node] / above, right))
        super().observe(request_id, draft, emitted)


def binned(said: np.ndarray, true: np.ndarray) -> list[dict[str, float]]:
    """Of nodes whose chance was said to be about the same: how many, the mean of what was said, the share that came
    true."""
    places = np.minimum((said * BINS).astype(int), BINS - 1)
    members = [(places == place) for place in range(BINS)]
    return [
        {"nodes": int(own.sum()), "said": float(said[own].mean()), "true": float(true[own].mean())}
        for own in members
        if own.any()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", default=str(HERE / "prompts.jsonl"))
    parser.add_argument("--per-category", type=int)
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    prompts = select(read_prompts(arguments.prompts), per_category=arguments.per_category)
    model = load(arguments.model)
    config = EngineConfig(cache=CacheConfig(prefix_caching=False), scheduler=SchedulerConfig(max_num_seqs=1))
    found: dict[str, Any] = {}
    for temperature in (0.0, 0.8):
        llm = LLM(model, config=config, speculation="auto", progress=False)
        policy = llm.engine.drafting.controller if llm.engine.drafting is not None else None
        assert isinstance(policy, CostPolicy)
        policy.acceptance = witness = Witness()
        for prompt in prompts:
            params = SamplingParams(temperature=temperature, max_tokens=arguments.max_tokens, seed=0)
            submit(llm, [prompt], params, mode="speculative")
        claimed, thought, true = np.array(witness.seen, dtype=np.float64).T
        found["greedy" if temperature == 0 else f"temperature {temperature}"] = {
            "claimed": binned(claimed, true),
            "thought": binned(thought, true),
        }
    results = {
        "model": f"{arguments.model}, {model.precision}",
        "settings": {"prompts": len(prompts), "max_tokens": arguments.max_tokens},
        "environment": describe_environment(),
        "found": found,
    }
    keep(results, f"reliability-{name_of(arguments.model)}")
    for name, own in found.items():
        print(name, *(f"{row['said']:.2f}: {row['true']:.2f} of {row['nodes']}" for row in own["thought"]), sep="\n  ")


if __name__ == "__main__":
    main()
