"""`paceline bench`: what speculation is worth, against plain decoding in the same process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.bench import peers
from paceline.bench.environment import describe_environment
from paceline.bench.report import summarize
from paceline.bench.runner import MODES, engines, measure
from paceline.bench.workload import read_prompts, select
from paceline.cli import options
from paceline.cli.output import Column, category_table, note, print_json, progress_bar
from paceline.config import at_least
from paceline.errors import ConfigError
from paceline.models import runners
from paceline.models.loader import load
from paceline.params import SamplingParams

if TYPE_CHECKING:
    from paceline.llm import LLM

_WITH_PEERS = ("model", "prompts", "per_category", "max_tokens", "repeats", "compare", "save", "speculation", "as_json")
COLUMNS: tuple[Column, ...] = (
    ("plain\ntokens/s", "plain", "tokens_per_second"),
    ("speculative\ntokens/s", "speculative", "tokens_per_second"),
    ("speed-up", None, "speedup"),
    ("decoding\nplain", "plain", "decode_tokens_per_second"),
    ("spec.", "speculative", "decode_tokens_per_second"),
    ("speed-up", None, "decode_speedup"),
)


def bench(
    context: typer.Context,
    model: options.Model,
    prompts: options.Prompts,
    limit: options.Limit = None,
    per_category: options.PerCategory = None,
    category: options.Category = None,
    max_tokens: options.MaxTokens = 96,
    temperature: options.Temperature = 0.0,
    seed: options.FixedSeed = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")] = False,
    concurrency: options.Concurrency = 1,
    repeats: Annotated[int, typer.Option(help="Runs of each prompt in each mode; medians are reported.")] = 1,
    compare: Annotated[
        str | None,
        typer.Option(
            help="Measure whole requests beside other engines instead, such as llama.cpp,openvino-lookup, each in an "
            "environment of its own; in a clone of the repository.",
            metavar="NAME,NAME,...",
        ),
    ] = None,
    save: Annotated[str | None, typer.Option(help="Write the JSON to this file too.", metavar="FILE")] = None,
    config_file: options.ConfigFile = None,
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
    """Measure plain and speculative decoding in one process, interleaved, prefix caching off.

    Each repeat has engines of its own, one that drafts and remembers nothing of the one before, and one without a
    drafter, on the same weights. One request at a time plain and speculative runs of a prompt follow each other; with
    --concurrency above 1 all prompts are handed in at once, and the engines take turns of a quarter of a second.

    tokens_per_second counts whole requests, prefill included; decode_tokens_per_second the time from the first output
    token to the last. With --concurrency above 1 the seconds of a request overlap with others': per category and for
    decoding the rates are then what one request sees, and only tokens_per_second of a mode is throughput.
    """
    at_least("--repeats", repeats, 1)
    at_least("--concurrency", concurrency, 1)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)
    chosen = select(read_prompts(prompts), categories=category or (), per_category=per_category, limit=limit)
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
        prefix_caching=False,  # neither run may profit from the other
        max_num_seqs=concurrency,
    )
    options.require_drafter(config)
    if save is not None:
        options.require_writable("--save", save)

    if compare is not None:
        _refuse_others(context)
        results, table = peers.compare(
            model,
            compare.split(","),
            speculation=speculation,
            prompts=prompts,
            per_category=per_category,
            max_tokens=max_tokens,
            repeats=repeats,
        )
        _publish(results, save=save, as_json=as_json, show=lambda: typer.echo(table))
        return 0
    loaded = load(model, progress=True)
    described: dict[str, Any] = {}

    def introduced() -> Iterator[LLM]:
        for llm in engines(loaded, config, repeats=repeats):
            if not described:
                note(llm.model_card)
                described.update(model=llm.model_card, settings=runners.settings(llm.config))
            yield llm
            del llm  # its memory, before the next one takes its own

    with progress_bar("measuring", total=len(MODES) * repeats * len(chosen)) as advance:
        at_once = concurrency > 1
        measurement = measure(introduced(), chosen, params=params, at_once=at_once, observe=lambda _: advance())
    report = summarize(measurement) | {
        "model": described["model"],
        "settings": {
            "prompts": len(chosen),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": ignore_eos,
            "concurrency": concurrency,
            "repeats": repeats,
            **described["settings"],
        },
        "environment": describe_environment(),
    }
    _publish(report, save=save, as_json=as_json, show=lambda: _print(report))
    return 0


def _refuse_others(context: typer.Context) -> None:
    """Raises ConfigError for an option that was given, and that peers cannot honour."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name not in _WITH_PEERS and source is not None and source.name != "DEFAULT":
            raise ConfigError(f"{parameter.opts[0]} does not go with --compare: leave one of them out.")


def _publish(report: dict[str, Any], *, save: str | None, as_json: bool, show: Callable[[], None]) -> None:
    if as_json:
        print_json(report)
    else:
        show()
    if save is not None:
        Path(save).write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(category_table(report, title="category", columns=COLUMNS))
    console.print(
        f"acceptance length {report['acceptance_length']:.2f}, acceptance rate {report['acceptance_rate']:.0%}, "
        f"{report['identical']} of {report['settings']['prompts']} prompts identical"
    )
    if report["speedup_range"] is None:
        console.print("one run of each prompt, which shows no spread: --repeats 5 does")
    else:
        low, high = report["speedup_range"]
        repeats = report["settings"]["repeats"]
        console.print(f"medians of {repeats} runs, whose speed-ups were {low:.2f}x to {high:.2f}x")
        single = report["settings"]["concurrency"] == 1  # of several at once the seconds of requests overlap
        bound = report["decode_speedup_bound" if single else "speedup_bound"]
        if bound is not None:
            console.print(f"{'decoding' if single else 'throughput'}: at least {bound:.2f}x, with 95% confidence")
    console.print(f"{report['environment']['cpu']}, {report['environment']['cores']} cores")
