"""What drafters that need no training are worth: renews results/drafters-MODEL.json and its table in docs/drafters.md.

usage: drafters.py [--model M] [--methods SPECULATION ...] [--category C] [--repeats N] [--add] [--max-tokens N]
       [--name NAME]
Each repeat measures every method once, in turn, each in a process of its own, so that no drafter remembers answers of
an earlier repeat: `paceline bench`, which runs plain decoding in the same engine, prompt by prompt. --add keeps the
runs that the file has.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from readme_table import spread
from results_file import keep, name_of, read, renew

HERE = Path(__file__).parent
METHODS = ("ngram", "suffix", "recycle", "suffix+recycle")
COPYING = ("summarization", "rag")  # where an answer repeats its prompt


def run(method: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What one `paceline bench` says."""
    command = [sys.executable, "-m", "paceline", "bench", arguments.model, "--prompts", arguments.prompts, "--json"]
    command += ["--max-tokens", str(arguments.max_tokens), "--speculation", method]
    command += ["--category", arguments.category] if arguments.category else []
    print("$", *command[1:], file=sys.stderr)
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run."""
    return {
        "decode_speedup": report["decode_speedup"],
        "by_category": {name: own["decode_speedup"] for name, own in report["by_category"].items()},
        "copying": copying_speedup(report),
        "acceptance_length": report["acceptance_length"],
        "acceptance_rate": report["acceptance_rate"],
        "identical": report["identical"],
    }


def copying_speedup(report: dict[str, Any]) -> float | None:
    """Decoding of the categories that copy, together, speculative over plain; None where they were not asked."""
    if not all(name in report["by_category"] for name in COPYING):
        return None
    plain, speculative = (report[mode]["by_category"] for mode in ("plain", "speculative"))
    seconds = [sum(own[name]["decode_seconds"] for name in COPYING) for own in (plain, speculative)]
    return seconds[0] / seconds[1]  # of the same tokens, as the ids agree


def render(results: dict[str, Any]) -> str:
    """A Markdown table of medians, with the conditions above it."""
    settings, environment, runs = results["settings"], results["environment"], results["runs"]
    first = next(iter(runs.values()))
    categories = list(first[0]["by_category"])
    categories = categories if len(categories) > 1 else []  # a single one is all
    counts = sorted({len(own) for own in runs.values()})
    copying = first[0]["copying"] is not None
    repeats = " or ".join(map(str, counts))
    measured = "single runs" if counts == [1] else f"medians of {repeats} interleaved runs, range in brackets"
    headings = ["tokens a pass", "ids as plain", "all", *([" and ".join(COPYING)] if copying else []), *categories]
    lines = [
        f"{results['model'].split(';')[0]}: decoding against plain decoding in the same process, greedy, "
        f"{settings['prompts']} prompts, {settings['max_tokens']} new tokens, default settings, one request at a time; "
        f"{environment['cpu']}, {environment['cores']} cores; {measured}.",
        "",
        f"| | {' | '.join(headings)} |",
        "|---" * (1 + len(headings)) + "|",
    ]
    for method, own in runs.items():
        cells = [
            spread([each["acceptance_length"] for each in own], "{:.2f}"),
            f"{min(each['identical'] for each in own)} of {settings['prompts']}",
            *(spread([each[name] for each in own], "{:.2f}x") for name in ("decode_speedup", "copying")[: 1 + copying]),
            *(spread([each["by_category"][name] for each in own], "{:.2f}x") for name in categories),
        ]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="SPECULATION")
    parser.add_argument("--prompts", default=str(HERE / "prompts.jsonl"))
    parser.add_argument("--category")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--add", action="store_true")
    parser.add_argument("--name", help="that stands for MODEL in the names of file and table")
    arguments = parser.parse_args()
    name = f"drafters-{arguments.name or name_of(arguments.model)}"
    results = read(name) if arguments.add else {}
    for _ in range(arguments.repeats):
        for method in arguments.methods:
            report = run(method, arguments)
            report["settings"].pop("speculation")
            conditions = {name: report[name] for name in ("settings", "environment")}
            if results and any(results[name] != value for name, value in conditions.items()):
                raise SystemExit(
                    f"{name} was measured under other conditions: leave out --add, or give another --name."
                )
            results |= {"model": report["model"], **conditions}
            results.setdefault("runs", {}).setdefault(method, []).append(figures(report))
            keep(results, name)
    renew("docs/drafters.md", render(results), name=name)
    print(render(results))


if __name__ == "__main__":
    main()
