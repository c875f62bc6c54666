"""Puts the table of a results file between the markers of README.md: readme_table.py [results/NAME.json]."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"


def render(results: dict[str, Any]) -> str:
    """A Markdown table in tokens per second, whole requests, with its conditions above."""
    settings, environment, systems = results["settings"], results["environment"], results["systems"]
    categories = list(next(iter(systems.values()))["by_category"])
    baseline = next(name for name in systems if not name.startswith("Paceline"))
    memory = round((environment["memory_bytes"] or 0) / 2**30)
    lines = [
        f"{results['model']}, greedy (temperature {settings['temperature']}), {settings['max_tokens']} new tokens, "
        f"{settings['per_category']} prompts of each category, one request at a time, prefill included; all systems "
        f"run the same 4-bit file, dequantised to the precision that a row names; "
        f"{environment['cpu']}, {environment['cores']} cores, {memory} GiB, torch {environment['versions']['torch']}; "
        f"median of {settings['repeats']} interleaved runs. Baseline: {baseline}.",
        "",
        f"| tokens/s | all | vs baseline | vs own plain | decoding only | {' | '.join(categories)} |",
        "|---" * (5 + len(categories)) + "|",
    ]
    for name, section in systems.items():
        ratio = section["tokens_per_second"] / systems[baseline]["tokens_per_second"]
        own_plain = systems[re.sub("ngram|prompt lookup", "plain", name)]
        speculation = section["tokens_per_second"] / own_plain["tokens_per_second"]
        cells = [f"{section['by_category'][category]['tokens_per_second']:.0f}" for category in categories]
        lines.append(
            f"| {name} | {section['tokens_per_second']:.1f} | {ratio:.2f}x | {speculation:.2f}x | "
            f"{section['decode_tokens_per_second']:.1f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def paste(readme: str, table: str) -> str:
    """README with the table between its markers."""
    head, rest = readme.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results" / "smollm2-135m.json"
    readme = HERE.parent / "README.md"
    table = render(json.loads(source.read_text(encoding="utf-8")))
    readme.write_text(paste(readme.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main()
