"""Paceline and its peers on one workload: writes results/MODEL.json and prints the README's table.

usage: compare.py [--model M] [--only KEY ...] [--repeats N] [--per-category N] [--max-tokens N] [--name NAME]
Each repeat runs every contestant once, in turn, each in a process of its own, so that all of them meet the same
machine. Greedy, one request at a time, the same GGUF file and token ids for all. Peers are installed when first needed,
into environments of their own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from readme_table import RATES, plain_name, render
from results_file import keep, name_of

from paceline.bench.environment import describe_environment
from paceline.bench.workload import read_prompts

HERE = Path(__file__).parent
SPECULATION = '{"method": "ngram", "num_speculative_tokens": 5}'  # peers draft 5, too
LOOKUP = ("--prompt-lookup",)
BFLOAT16 = ("--engine", "torch", "--dtype", "bfloat16")


@dataclass(frozen=True, slots=True)
class Contestant:
    """One row of the table."""

    script: str  # in peers/
    flags: tuple[str, ...] = ()
    small: bool | None = None  # True: takes too long on a model of more than SMALL_BYTES; False: of no use below


SMALL_BYTES = 500e6
DRAFT_MODEL = '{"method": "auto", "model": "smollm2-135m"}'  # beside what auto drafts by itself
CONTESTANTS = {  # the first peer that takes part is the baseline of the table
    "native": Contestant("paceline_generate"),
    "native-ngram": Contestant("paceline_generate", ("--speculation", SPECULATION)),
    "native-auto": Contestant("paceline_generate", ("--speculation", "auto")),
    "native-auto-draft": Contestant("paceline_generate", ("--speculation", DRAFT_MODEL), small=False),
    "torch": Contestant("paceline_generate", BFLOAT16, small=True),
    "torch-ngram": Contestant("paceline_generate", (*BFLOAT16, "--speculation", SPECULATION), small=True),
    "llama.cpp": Contestant("llama_cpp_python"),
    "llama.cpp-lookup": Contestant("llama_cpp_python", LOOKUP),
    "openvino": Contestant("openvino_pipeline"),
    "openvino-lookup": Contestant("openvino_pipeline", LOOKUP),
    "vllm": Contestant("vllm_cpu", small=True),
    "vllm-lookup": Contestant("vllm_cpu", LOOKUP, small=True),
    "transformers": Contestant("transformers_generate", small=True),
    "transformers-lookup": Contestant("transformers_generate", LOOKUP, small=True),
}


def run(contestant: Contestant, workload: list[str]) -> dict[str, Any]:
    """The JSON that a contestant prints last; its stderr passes through."""
    script = HERE / "peers" / f"{contestant.script}.py"
    command = [sys.executable, str(script), *workload, *contestant.flags]
    print("$", *command[1:], file=sys.stderr)
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(output.strip().splitlines()[-1])


def summarize(reports: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Of the reports of each system, one a repeat: medians of all numbers, and each repeat's value of the main ones.

    Where a system drafts and its plain mode took part, `identical` counts the prompts with the ids of that mode.
    """
    systems = {}
    for name, own in reports.items():
        systems[name] = middle([numbers(report) for report in own])
        plain = reports.get(plain_name(name), own)
        if plain is not own:
            pairs = zip(own[0]["outputs"], plain[0]["outputs"], strict=True)
            systems[name]["identical"] = sum(mine == theirs for mine, theirs in pairs)
    repeats = {name: {rate: [report[rate] for report in own] for rate in RATES} for name, own in reports.items()}
    return {"systems": systems, "repeats": repeats}


def numbers(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if isinstance(value, (dict, int, float))}


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Each number's median over the repeats."""
    return {
        key: middle([run[key] for run in runs]) if isinstance(value, dict) else median(run[key] for run in runs)
        for key, value in runs[0].items()
    }


def compare(
    model: str,
    contestants: Sequence[Contestant],
    *,
    speculation: str,
    prompts: str,
    per_category: int | None,
    max_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """What a results file holds. speculation: what Paceline drafts by; per_category: None = all prompts."""
    from paceline.models.loader import load

    count = len(read_prompts(prompts)) if per_category is None else per_category
    workload = [model, "--prompts", prompts, "--per-category", str(count), "--max-tokens", str(max_tokens)]
    reports: dict[str, list[dict[str, Any]]] = {}
    for _ in range(repeats):
        for contestant in contestants:
            report = run(contestant, workload)
            reports.setdefault(report["system"], []).append(report)
    return {
        "model": f"{model}, {load(model).precision}",
        "settings": {
            "prompts": Path(prompts).name,
            "per_category": per_category,
            "max_tokens": max_tokens,
            "temperature": 0,
            "concurrency": 1,
            "repeats": repeats,
            "speculation": speculation,
        },
        "environment": describe_environment(),
        **summarize(reports),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, metavar="KEY", help=f"of {', '.join(CONTESTANTS)}")
    parser.add_argument("--prompts", default=str(HERE / "prompts.jsonl"))
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", help="of the file in results/; the model's, if left out")
    arguments = parser.parse_args()
    from paceline.models.loader import load

    small = load(arguments.model).path.stat().st_size <= SMALL_BYTES
    keys = arguments.only or [key for key, own in CONTESTANTS.items() if own.small in (None, small)]
    results = compare(
        arguments.model,
        [CONTESTANTS[key] for key in keys],
        speculation=SPECULATION,
        prompts=arguments.prompts,
        per_category=arguments.per_category,
        max_tokens=arguments.max_tokens,
        repeats=arguments.repeats,
    )
    keep(results, arguments.name or name_of(arguments.model))
    print(render(results))


if __name__ == "__main__":
    main()
