"""Paceline, plain and with prompt lookup, against its peers on one workload: writes results/NAME.json and a table.

usage: compare.py [--repeats N] [--per-category N] [--max-tokens N] [--dtypes float32 bfloat16] [--name NAME]
Each repeat runs every system once, in turn, each in a process of its own, so that all of them meet the same machine;
figures are the medians over the repeats. Greedy, one request at a time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from readme_table import render

from paceline.bench.environment import describe_environment

HERE = Path(__file__).parent
SPECULATION = '{"method": "ngram", "num_speculative_tokens": 5}'


def run_json(command: list[str]) -> dict[str, Any]:
    """The JSON that a command prints last; its stderr passes through."""
    print("$", *command[1:], file=sys.stderr)
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(output.strip().splitlines()[-1])


def run_paceline(workload: list[str], *, model: str, dtype: str) -> dict[str, dict[str, Any]]:
    """Both modes of one `paceline bench`, by the name of their row."""
    command = [sys.executable, "-m", "paceline", "bench", model, *workload]
    report = run_json([*command, "--dtype", dtype, "--speculation", SPECULATION, "--json"])
    prompts = report["settings"]["prompts"]
    print(f"{report['identical']} of {prompts} prompts with identical ids", file=sys.stderr)
    acceptance = {name: report[name] for name in ("acceptance_length", "acceptance_rate", "identical")}
    return {
        f"Paceline plain, {dtype}": report["plain"],
        f"Paceline ngram, {dtype}": report["speculative"] | acceptance,
    }


def run_transformers(workload: list[str], *, model: str, lookup: bool) -> dict[str, dict[str, Any]]:
    """One run of the peer script, by the name of its row."""
    flags = ["--prompt-lookup"] if lookup else []
    report = run_json([sys.executable, str(HERE / "peers" / "transformers_generate.py"), model, *workload, *flags])
    name = f"{report.pop('peer')} {'prompt lookup' if lookup else 'plain'}, {report.pop('dtype')}"
    return {name: report}


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Each number's median over the repeats."""
    first = runs[0]
    return {
        key: middle([run[key] for run in runs]) if isinstance(value, dict) else median(run[key] for run in runs)
        for key, value in first.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", default=str(HERE / "prompts.jsonl"))
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--name", default="smollm2-135m", help="of the file in results/")
    arguments = parser.parse_args()
    model = arguments.model
    workload = [
        *("--prompts", arguments.prompts),
        *("--per-category", str(arguments.per_category)),
        *("--max-tokens", str(arguments.max_tokens)),
    ]
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(arguments.repeats):
        sections: dict[str, dict[str, Any]] = {}
        for dtype in arguments.dtypes:
            sections |= run_paceline(workload, model=model, dtype=dtype)
        for lookup in (False, True):
            sections |= run_transformers(workload, model=model, lookup=lookup)
        for name, section in sections.items():
            runs.setdefault(name, []).append(section)
    results = {
        "model": model,
        "settings": {
            "prompts": Path(arguments.prompts).name,
            "per_category": arguments.per_category,
            "max_tokens": arguments.max_tokens,
            "temperature": 0,
            "concurrency": 1,
            "repeats": arguments.repeats,
            "speculation": json.loads(SPECULATION),
        },
        "environment": describe_environment(),
        "systems": {name: middle(sections) for name, sections in runs.items()},
    }
    path = HERE / "results" / f"{arguments.name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(render(results))


if __name__ == "__main__":
    main()
