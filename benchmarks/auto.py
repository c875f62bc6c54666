"""Is `auto` ever a bad deal? Its speed against plain decoding, and what it exceeds with 95% confidence.

usage: auto.py [--model M] [--speculation S] [--only CASE ...] [--per-category N] [--max-tokens N] [--repeats N]
       [--name NAME]
Greedy, at temperature 1.5, after prompts of random tokens, and with 8 and 16 requests at once: `paceline bench`, which
runs plain decoding beside it, prompt by prompt or, of several at once, in turns of a quarter of a second. Renews
results/auto-MODEL.json, from which cases of another machine or model go; performance_page.py makes a table of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from results_file import keep, name_of, read

from paceline.models.loader import LoadedModel, load

HERE = Path(__file__).parent
RANDOM = "random tokens"
CASES = {  # options of paceline bench
    "greedy": (),
    "temperature 1.5": ("--temperature", "1.5"),
    RANDOM: (),
    "8 at once": ("--concurrency", "8"),
    "16 at once": ("--concurrency", "16"),
}
RANDOM_PROMPTS, RANDOM_TOKENS = 14, 100


def random_prompts(model: LoadedModel) -> list[dict[str, Any]]:
    """Lines of a prompt file whose texts mean nothing."""
    rng = np.random.default_rng(0)
    tokenizer = model.tokenizer
    ids = [i for i in range(model.spec.vocab_size) if i not in tokenizer.special_ids]
    texts = [tokenizer.decode(rng.choice(ids, RANDOM_TOKENS).tolist()) for _ in range(RANDOM_PROMPTS)]
    return [{"id": f"random-{i}", "category": RANDOM, "turns": [text]} for i, text in enumerate(texts)]


def run(case: str, arguments: argparse.Namespace, *, prompts: str) -> dict[str, Any]:
    """What `paceline bench` says of a case."""
    command = [sys.executable, "-m", "paceline", "bench", arguments.model, "--json", "--prompts", prompts]
    command += ["--speculation", arguments.speculation, "--repeats", str(arguments.repeats)]
    command += ["--max-tokens", str(arguments.max_tokens)]
    if arguments.per_category is not None and case != RANDOM:
        command += ["--per-category", str(arguments.per_category)]
    command += CASES[case]
    print("$", *command[1:], file=sys.stderr)
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """What is kept of it: of requests at once their throughput, of single ones their decoding."""
    single = report["settings"]["concurrency"] == 1
    name = "decode_speedup" if single else "speedup"
    by_category = report["by_category"] if single and len(report["by_category"]) > 1 else {}
    return {
        **{name: report["settings"][name] for name in ("prompts", "max_tokens", "repeats")},
        "control": "an engine without a drafter on the same weights",
        "method": report["settings"]["speculation"]["method"],
        "identical": report["identical"],
        "acceptance_length": report["acceptance_length"],
        "speedup": report[name],
        "bound": report[f"{name}_bound"],
        "by_category": {
            category: {"speedup": own[name], "bound": own[f"{name}_bound"]} for category, own in by_category.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--speculation", default="auto")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--per-category", type=int, help="prompts; all, if left out")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", help="of the file in results/; auto-MODEL, if left out")
    arguments = parser.parse_args()
    model = load(arguments.model)
    name = arguments.name or f"auto-{name_of(arguments.model)}"
    results = read(name) if arguments.only else {}
    with tempfile.TemporaryDirectory() as folder:
        random = Path(folder) / "random.jsonl"
        random.write_text("".join(json.dumps(line) + "\n" for line in random_prompts(model)), encoding="utf-8")
        for case in arguments.only or CASES:
            report = run(case, arguments, prompts=str(random if case == RANDOM else HERE / "prompts.jsonl"))
            model_card, _, _ = report["model"].partition(";")  # the rest depends on the case
            conditions = {"model": model_card, "environment": report["environment"]}
            if any(results.get(name) != value for name, value in conditions.items()):
                results = {**conditions, "cases": {}}  # a table of one machine
            results["cases"][case] = figures(report)
            keep(results, name)
            print(case, json.dumps(results["cases"][case]), flush=True)


if __name__ == "__main__":
    main()
