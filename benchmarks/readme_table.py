"""The table of a comparison with other systems, as in README.md."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
COLUMNS = (
    *("tokens/s", "all", "vs baseline", "vs own plain", "ids as plain", "decoding only"),
    "prefill of 1,000 tokens",
)
RATES = ("tokens_per_second", "decode_tokens_per_second", "prefill_tokens_per_second")  # kept for each repeat


def render(results: dict[str, Any], *, by_category: bool = True) -> str:
    """A Markdown table in tokens per second, whole requests, with its conditions above."""
    settings, environment, systems = results["settings"], results["environment"], results["systems"]
    rates = {name: own["tokens_per_second"] for name, own in results["repeats"].items()}
    categories = list(next(iter(systems.values()))["by_category"]) if by_category else []
    baseline = next((name for name in systems if not name.startswith("Paceline")), next(iter(systems)))
    memory = round((environment["memory_bytes"] or 0) / 2**30)
    count, each = settings["repeats"], settings["per_category"]
    prompts = "all prompts of the file" if each is None else f"{each} prompts of each category"
    lines = [
        f"{results['model']}, greedy (temperature {settings['temperature']}), {settings['max_tokens']} new tokens, "
        f"{prompts}, one request at a time, prefill included; all systems "
        f"read the same file, and those whose row names a precision dequantise it to that first; {environment['cpu']}, "
        f"{environment['cores']} cores, {memory} GiB; median of {count} interleaved runs, their range in brackets; "
        f"ratios are taken within each run. Baseline: {baseline}.",
        "",
        f"| {' | '.join([*COLUMNS, *categories])} |",
        "|---" * (len(COLUMNS) + len(categories)) + "|",
    ]
    for name, section in systems.items():
        plain = plain_name(name)
        cells = [
            spread(rates[name], "{:.1f}"),
            spread(ratios(rates[name], rates[baseline]), "{:.2f}x"),
            spread(ratios(rates[name], rates[plain]), "{:.2f}x") if plain in rates else "-",
            f"{section['identical']} of {section['requests']:.0f}" if "identical" in section else "-",
            f"{section['decode_tokens_per_second']:.1f}",
            f"{section['prefill_tokens_per_second']:.0f}",
            *(f"{section['by_category'][category]['tokens_per_second']:.0f}" for category in categories),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plain_name(name: str) -> str:
    """The row of a system's plain mode."""
    if name.startswith("Paceline ") and " on torch " not in name:
        return "Paceline plain"
    return re.sub("ngram|prompt lookup", "plain", name)


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    """Repeat by repeat: what changes between repeats, such as the machine's load, falls on both."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def spread(values: list[float], form: str) -> str:
    """The median, and the range if there is one."""
    middle, low, high = (form.format(value) for value in (median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low.removesuffix('x')}-{high.removesuffix('x')})"
