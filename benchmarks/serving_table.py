"""The table of docs/serving.md, from the results of serving.py."""

from __future__ import annotations

from typing import Any

from readme_table import ratios, spread


def render(results: dict[str, Any]) -> str:
    """Markdown: conditions, throughput by concurrency with ratios to the peers, and waiting times."""
    settings, environment, systems = results["settings"], results["environment"], results["systems"]
    memory = round((environment["memory_bytes"] or 0) / 2**30)
    levels = list(next(iter(systems.values()))["load"])
    most = levels[-1]
    peers = [name for name in systems if not name.startswith("Paceline")]
    rivals = [(peer, level) for peer in peers for level in levels[1:]]
    lines = [
        f"{results['model']}, greedy, up to {settings['max_tokens']} new tokens, streamed over each server's own HTTP "
        f"API to one client on the same machine; {environment['cpu']}, {environment['cores']} cores, {memory} GiB; "
        f"median of {settings['repeats']} interleaved runs, their range in brackets; ratios are taken within each run.",
        "",
        f"| {' | '.join(['tokens/s, at once:', *levels, *(f'vs {peer} at {level}' for peer, level in rivals)])} |",
        "|---" * (1 + len(levels) + len(rivals)) + "|",
    ]
    for name, system in systems.items():
        rates = {level: own["tokens_per_second"] for level, own in system["load"].items()}
        against = [
            "-" if name in peers else spread(ratios(rates[n], systems[peer]["load"][n]["tokens_per_second"]), "{:.1f}x")
            for peer, n in rivals
        ]
        lines.append(f"| {' | '.join([name, *(spread(rates[n], '{:.0f}') for n in levels), *against])} |")
    lines += [
        "",
        f"| ms, median (p95) | first token, {most} at once | per token | between events "
        f"| first token of {settings['long_prompt_tokens']:,} alone | beside {settings['decoders']} decoders "
        f"| these wait meanwhile, p95 | longest |",
        "|---" * 8 + "|",
    ]
    for name, system in systems.items():
        own, stall = system["load"][most], system["stall"]
        kinds = ("first_token_milliseconds", "milliseconds_per_token", "milliseconds_between_events")
        cells = [f"{own[kind]['p50']:.0f} ({own[kind]['p95']:.0f})" for kind in kinds]
        waits = ("long_alone_milliseconds", "long_beside_milliseconds", "p95_milliseconds", "longest_milliseconds")
        lines.append(f"| {' | '.join([name, *cells, *(f'{stall[wait]:.0f}' for wait in waits)])} |")
    return "\n".join(lines)
