"""`paceline profile`: what a target pass costs by number of tokens, and what a draft costs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.bench import cost_plot
from paceline.bench.bandwidth import read_bandwidth
from paceline.bench.cost_curve import Curve, measure
from paceline.bench.environment import describe_environment
from paceline.cli import options
from paceline.cli.output import note, print_json, progress_bar
from paceline.config import EngineConfig, at_least, usable_cores
from paceline.models import runners

if TYPE_CHECKING:
    from paceline.interfaces import Runner


def profile(
    model: options.Model,
    context: Annotated[int, typer.Option(help="Tokens in the K/V cache before each pass.")] = 256,
    tokens: Annotated[str, typer.Option(help="Numbers of tokens of a pass.", metavar="N,N,...")] = "1,2,4,8,16,32",
    repeats: Annotated[int, typer.Option(help="Passes of each size; medians are reported.")] = 15,
    plot: Annotated[str | None, typer.Option(help="Draw the curve too: an .svg or .png.", metavar="FILE")] = None,
    speculation: options.Speculation = options.DEFAULT_SPECULATION,
    engine: options.Engine = "auto",
    device: options.Device = "cpu",
    dtype: options.DType = "auto",
    quantization: options.Quantization = None,
    kv_cache_memory: options.KVCacheMemory = None,
    kv_cache_dtype: options.KVCacheDType = "auto",
    threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
    as_json: options.AsJSON = False,
) -> int:
    """Measure what a target pass costs by its number of tokens, beside the time in which its weights can be read.

    This curve is what speculation lives on: a draft of n tokens pays once a pass yields more tokens than a pass over
    1 + n costs passes over one. Every row is sampled greedily, as verification does; rounds over all sizes alternate
    their order. The floor is the weights' bytes over the read bandwidth measured in the same run. The drafter is timed
    with drafts of as many nodes as it finds in a text that repeats itself, which may be fewer than it is allowed.
    """
    at_least("--context", context, 1, example=256)
    at_least("--repeats", repeats, 1, example=15)
    counts = options.parse_counts("--tokens", tokens)
    config = options.engine_config(
        engine=engine,
        device=device,
        dtype=dtype,
        quantization=quantization,
        speculation=speculation,
        kv_cache_memory=kv_cache_memory,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        max_model_len=max_model_len,
        max_num_seqs=1,
    )
    if plot is not None:
        options.require_writable("--plot", plot)
        cost_plot.require(plot)

    from paceline.llm import LLM

    llm = LLM(model, config=config, progress=True)  # not closed: what its drafter sees here is not worth saving
    note(llm.model_card)
    drafter = llm.engine.drafter
    bandwidth = _bandwidth(llm.runner, config)
    with progress_bar("measuring", total=repeats) as advance:
        curve = measure(
            llm.runner,
            tokens=counts,
            context=context,
            repeats=repeats,
            drafter=drafter,
            draft_tokens=_draft_tokens(counts, config) if drafter is not None else (),
            advance=advance,
        )
    report = curve_json(curve, runner=llm.runner, bandwidth=bandwidth, drafter=drafter.name if drafter else "") | {
        "model": llm.model_card,
        "settings": {
            "context": context,
            "repeats": repeats,
            **runners.settings(llm.config),
        },
        "environment": describe_environment(),
    }
    if as_json:
        print_json(report)
    else:
        _print(report)
    if plot is not None:
        cost_plot.draw(report, plot)
    return 0


def _bandwidth(runner: Runner, config: EngineConfig) -> float | None:
    """GB/s of the host's memory, which is not what a pass on another device waits for."""
    if config.device != "cpu":
        return None
    return read_bandwidth(num_bytes=runner.weight_bytes, num_threads=config.num_threads or usable_cores())


def _draft_tokens(counts: list[int], config: EngineConfig) -> list[int]:
    """Nodes of the drafts that passes over so many tokens verify, where drafts have at most the configured length."""
    longest = config.speculation.max_draft_tokens
    return sorted({min(count - 1, longest) for count in counts if count > 1} or {longest})


def curve_json(curve: Curve, *, runner: Runner, bandwidth: float | None, drafter: str) -> dict[str, Any]:
    """The JSON of `paceline profile`, but for model, settings and environment."""
    return {
        "target": [asdict(cost) for cost in curve.target],
        "drafters": [{"drafter": drafter, **asdict(cost)} for cost in curve.draft],
        "floor_ms": None if bandwidth is None else runner.weight_bytes / bandwidth * 1e-6,
        "weight_bytes": runner.weight_bytes,
        "kv_bytes_per_token": runner.kv.bytes_per_block // runner.kv.block_size,
        "bandwidth_gb_s": bandwidth,
    }


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    floor, first = report["floor_ms"], report["target"][0]
    table = Table(box=None, pad_edge=False)
    headings = ("tokens\nof a pass", "ms\nmedian", "\n25%", "\n75%", "over\nfirst", "over\nfloor")
    for heading in headings:
        table.add_column(heading, justify="right")
    for cost in report["target"]:
        table.add_row(
            str(cost["tokens"]),
            *(f"{cost[name]:.2f}" for name in ("ms", "low_ms", "high_ms")),
            f"{cost['ms'] / first['ms']:.2f}x",
            f"{cost['ms'] / floor:.2f}x" if floor else "-",
        )
    console = Console()
    console.print(table)
    for cost in report["drafters"]:
        asked = f" of {cost['budget']}" if cost["tokens"] < cost["budget"] else ""
        console.print(
            f"{cost['drafter']} drafts {cost['tokens']}{asked} in {cost['ms']:.3f} ms "
            f"({cost['low_ms']:.3f} to {cost['high_ms']:.3f})",
            highlight=False,
        )
    if floor is not None:
        console.print(
            f"floor {floor:.2f} ms: {report['weight_bytes'] / 1e6:,.1f} MB of weights a pass, read at "
            f"{report['bandwidth_gb_s']:.1f} GB/s",
            highlight=False,
        )
    environment = report["environment"]
    console.print(f"{environment['cpu']}, {environment['cores']} cores", highlight=False)
