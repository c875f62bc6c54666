"""`paceline tune`: does speculation pay for this model, on this machine, with these prompts?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.bench import cost_plot, tuning, tuning_page
from paceline.bench.environment import describe_environment
from paceline.bench.workload import read_prompts, select
from paceline.cli import options
from paceline.cli.output import note, print_json, progress_bar
from paceline.config import MAX_DRAFT_TOKENS, at_least
from paceline.errors import ConfigError
from paceline.models.loader import load
from paceline.params import SamplingParams

FILES = ("config.json", "tune.json", "tune.png", "tune.html")


def tune(
    model: options.Model,
    prompts: options.Prompts,
    limit: options.Limit = None,
    per_category: options.PerCategory = None,
    category: options.Category = None,
    max_tokens: options.MaxTokens = 96,
    temperature: options.Temperature = 0.0,
    seed: options.FixedSeed = 0,
    repeats: Annotated[int, typer.Option(help="Runs of each prompt in each setting and mode.")] = 1,
    lengths: Annotated[str, typer.Option(help="Fixed draft lengths to try.", metavar="N,N,...")] = "1,2,4,8,16",
    batches: Annotated[str, typer.Option(help="Numbers of requests at once.", metavar="N,N,...")] = "1,2,4,8,16",
    save: Annotated[
        str | None,
        typer.Option(
            help="Folder for config.json, which --config reads, tune.json, tune.png and tune.html.", metavar="DIR"
        ),
    ] = None,
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
    """Find out whether speculation pays: for your model and prompts, on this machine.

    Runs the prompts under `auto`, with each fixed draft length, and with several requests at once, each time plainly
    beside it, and says which setting decodes fastest, what measured costs foretold, and from how many requests at once
    on there is nothing to gain.
    """
    at_least("--repeats", repeats, 1)
    at_least("--max-tokens", max_tokens, 2, example=96)  # the first one is prefill's
    settings = tuning.settings(_lengths(lengths), options.parse_counts("--batches", batches))
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
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
        prefix_caching=False,  # no run may profit from another
    )
    options.require_drafter(config)
    folder = None if save is None else _folder(save)
    loaded = load(model)
    trials = []
    total = tuning.num_requests(settings, chosen, repeats)
    with progress_bar("measuring", total=total) as advance:
        for setting in settings:
            trial = tuning.run(loaded, config, setting, chosen, params=params, repeats=repeats, advance=advance)
            trials.append(trial)
            if not trial.report["plain"]["decode_seconds"]:
                raise ConfigError("all answers ended with their first token: give prompts that have longer ones.")
            note(f"{setting.name}: {trial.speedup:.2f}x")
    report = {
        "model": f"{model}, {loaded.precision}",
        "settings": {"prompts": len(chosen), "max_tokens": max_tokens, "temperature": temperature, "repeats": repeats},
        "trials": [_trial_json(trial) for trial in trials],
        "verdict": _verdict(trials),
        "config": {"speculation": _chosen(speculation, tuning.recommended(trials))},
        "environment": describe_environment(),
    }
    if as_json:
        print_json(report)
    else:
        _print(report)
    if folder is not None:
        _save(report, folder)
        note(f"kept in {folder}: {', '.join(FILES)}")
    return 0


def _lengths(text: str) -> list[int]:
    lengths = options.parse_counts("--lengths", text)
    if lengths[-1] > MAX_DRAFT_TOKENS:
        raise ConfigError(f"--lengths must be at most {MAX_DRAFT_TOKENS}; got {lengths[-1]}: leave it out.")
    return lengths


def _folder(save: str) -> Path:
    """The folder, made if need be, before anything is measured."""
    cost_plot.require("tune.png", option="--save")
    folder = Path(save)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--save {save}: cannot be made ({error.strerror}); choose another place.") from error
    for name in FILES:
        options.require_writable("--save", str(folder / name))
    return folder


def _chosen(speculation: str, recommended: dict[str, Any] | str) -> dict[str, Any] | str:
    """The user's own speculation, changed as recommended."""
    if isinstance(recommended, str):
        return recommended
    own = json.loads(speculation) if speculation.lstrip().startswith("{") else {"method": speculation}
    return {**own, **recommended}


def _trial_json(trial: tuning.Trial) -> dict[str, Any]:
    report = trial.report
    rate = "decode_tokens_per_second" if trial.setting.concurrency == 1 else "tokens_per_second"
    return {
        "name": trial.setting.name,
        "length": trial.setting.length,
        "concurrency": trial.setting.concurrency,
        "plain_tokens_per_second": report["plain"][rate],
        "speculative_tokens_per_second": report["speculative"][rate],
        "speedup": trial.speedup,
        "predicted_speedup": trial.predicted_speedup,
        "acceptance_length": report["acceptance_length"],
        "acceptance_rate": report["acceptance_rate"],
        "accepted_per_position": list(trial.accepted_per_position),
        "identical": report["identical"],
        "by_category": {
            name: {"speedup": own["decode_speedup"] or 1.0, "acceptance_length": trial.acceptance_lengths[name]}
            for name, own in report["by_category"].items()
        },
    }


def _verdict(trials: Sequence[tuning.Trial]) -> str:
    auto, best = trials[0], tuning.best_fixed(trials)
    even = tuning.break_even(trials)
    pays = "Speculation pays" if tuning.recommended(trials) != "none" else "Speculation does not pay"
    batches = "at all batch sizes tried" if even is None else f"nothing from {even} requests at once on"
    return (
        f"{pays}: auto decodes at {auto.speedup:.2f}x plain speed ({auto.predicted_speedup:.2f}x by cost), the best "
        f"fixed length, {best.setting.name}, at {best.speedup:.2f}x; auto gains {batches}."
    )


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for heading in ("plain\ntokens/s", "speculative\ntokens/s", "speed-up", "by cost", "tokens\na pass", "accepted"):
        table.add_column(heading, justify="right")
    for trial in report["trials"]:
        table.add_row(
            trial["name"],
            f"{trial['plain_tokens_per_second']:.1f}",
            f"{trial['speculative_tokens_per_second']:.1f}",
            f"{trial['speedup']:.2f}x",
            f"{trial['predicted_speedup']:.2f}x",
            f"{trial['acceptance_length']:.2f}",
            f"{trial['acceptance_rate']:.0%}",
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(report["verdict"])
    console.print(f"--speculation '{json.dumps(report['config']['speculation'])}'")


def _save(report: dict[str, Any], folder: Path) -> None:
    for name, value in (("config.json", report["config"]), ("tune.json", report)):
        (folder / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "tune.html").write_text(tuning_page.render(report), encoding="utf-8")
    tuning_page.draw(report, folder / "tune.png")
