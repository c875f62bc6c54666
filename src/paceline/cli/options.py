"""Options that several commands share, and the config they amount to."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from paceline.cli.guard import exit_code
from paceline.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from paceline.errors import ConfigError, PromptError

DEFAULT_SPECULATION = "auto"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

Model = Annotated[
    str, typer.Argument(help="Short name (see `paceline models`), model folder, GGUF file or hub id.", metavar="MODEL")
]
Prompts = Annotated[str, typer.Option(help="Prompt file: JSON lines with id, category and turns.", metavar="FILE")]
Speculation = Annotated[
    str,
    typer.Option(
        help="none, auto, ngram, suffix, recycle, layer_skip, several joined by + (suffix+recycle), a plug-in's "
        'package.module:Class, or JSON, which draft_model needs: {"method": "draft_model", "model": "NAME"}.',
        metavar="JSON",
    ),
]
MaxTokens = Annotated[int, typer.Option(help="Output tokens at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; otherwise logits are divided by it.")]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the smallest set of tokens that holds this probability.")]
MinP = Annotated[float, typer.Option(help="Drop tokens less likely than this times the likeliest.")]
Seed = Annotated[int | None, typer.Option(help="64 bits; none given = fresh random bits, reported in the output.")]
FixedSeed = Annotated[int, typer.Option(help="Seed of both runs; it matters at a temperature above 0.")]
Limit = Annotated[int | None, typer.Option(help="Use the first N prompts of the file.")]
PerCategory = Annotated[int | None, typer.Option(help="Use the first N prompts of each category.")]
Category = Annotated[list[str] | None, typer.Option(help="Only prompts of this category; may be given repeatedly.")]
Concurrency = Annotated[int, typer.Option(help="Requests that run at once.")]
Engine = Annotated[
    str,
    typer.Option(
        help="What runs the passes: auto, torch or native; auto is native on a CPU where it is built, else torch.",
        rich_help_panel="Engine",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="Where weights and K/V are: cpu, or with the torch engine another device that it knows.",
        rich_help_panel="Engine",
    ),
]
DType = Annotated[
    str,
    typer.Option(
        help="Weights: auto, float32 or bfloat16; auto is the file's own on the native engine, float32 with torch on a "
        "CPU, else bfloat16.",
        rich_help_panel="Engine",
    ),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="Quantise the weights of a float checkpoint: int8 or int4; native engine.",
        metavar="TYPE",
        rich_help_panel="Engine",
    ),
]
KVCacheDType = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        help="K/V of the native engine: auto, int16 or int8; auto is int16. With torch they follow --dtype.",
        rich_help_panel="Engine",
    ),
]
KVCacheMemory = Annotated[
    str | None,
    typer.Option(
        help="Bytes of the K/V cache, such as 512M or 2G; default from the free memory.",
        metavar="BYTES",
        rich_help_panel="Engine",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="CPU threads of a pass; default: the cores this process may use.", rich_help_panel="Engine"),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Tokens a sequence may hold; default: the model's context.", rich_help_panel="Engine"),
]
Trace = Annotated[
    str | None,
    typer.Option(
        help="Write what each step does to this file, drafts and probabilities included; `paceline trace` shows it.",
        metavar="FILE",
    ),
]


def _take_config(context: typer.Context, path: str | None) -> None:
    """Makes the file's options the command's defaults; the command is not guarded yet."""
    code = 0 if path is None else exit_code(lambda: _read_config(context, path))
    if code:
        raise typer.Exit(code)


def _read_config(context: typer.Context, path: str) -> int:
    try:
        pairs = json.loads(Path(path).read_text(encoding="utf-8-sig"), object_pairs_hook=tuple)
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path} is not valid JSON ({error}): `paceline tune --save` writes one.") from error
    if not isinstance(pairs, tuple):
        raise ConfigError(f'--config {path} must be a JSON object such as {{"speculation": "suffix"}}.')
    named = {name.strip("-"): own for own in context.command.params for name in own.opts if name.startswith("-")}
    defaults: dict[str, Any] = {}
    for name, value in pairs:
        parameter = named.get(name.replace("_", "-"))
        if parameter is None or parameter.name in (None, "config_file", "help"):
            raise ConfigError(f"--config {path}: {context.info_name} has no option {name!r:.60}: drop it.")
        if parameter.name in defaults:
            raise ConfigError(f"--config {path} names {name!r:.60} twice: drop one.")
        defaults[parameter.name] = _value(context, parameter, value, f"--config {path}: {name}")
    context.default_map = defaults
    return 0


def _value(context: typer.Context, parameter: Any, value: Any, where: str) -> Any:
    """A JSON value as the command line would have it. Raises ConfigError for one that the option does not take."""
    if isinstance(value, bool) or parameter.is_flag:
        if not (isinstance(value, bool) and parameter.is_flag):
            kind = "true or false" if parameter.is_flag else "a text or a number"
            raise ConfigError(f"{where} must be {kind}; got {value!r:.60}.")
        return value
    if parameter.multiple and isinstance(value, list) and all(isinstance(own, str) for own in value):
        return value
    if isinstance(value, tuple):
        value = json.dumps(_with_objects(value))
    if not isinstance(value, (str, int, float)):
        raise ConfigError(f"{where} must be a text or a number; got {value!r:.60}.")
    text = str(value)
    try:
        parameter.process_value(context, text)
    except typer.BadParameter as error:
        raise ConfigError(f"{where} cannot be {text!r:.60} ({error.message}).") from error
    return text


def _with_objects(value: Any) -> Any:
    """JSON whose objects were read as tuples of pairs."""
    if isinstance(value, tuple):
        return {name: _with_objects(own) for name, own in value}
    return [_with_objects(own) for own in value] if isinstance(value, list) else value


ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        help="JSON file of options by name, as `paceline tune --save` writes; what the command line says goes first.",
        metavar="FILE",
        callback=_take_config,
        is_eager=True,
        expose_value=False,
    ),
]
AsJSON = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def engine_config(
    *,
    engine: str = "auto",
    device: str = "cpu",
    dtype: str = "auto",
    quantization: str | None = None,
    speculation: str = "none",
    kv_cache_memory: str | None = None,
    kv_cache_dtype: str = "auto",
    threads: int | None = None,
    max_model_len: int | None = None,
    prefix_caching: bool = True,
    max_num_seqs: int = 16,
) -> EngineConfig:
    """The engine that the shared options ask for. Raises ConfigError for a value outside its rule."""
    return EngineConfig(
        engine=engine,  # type: ignore[arg-type]  # checked by EngineConfig
        device=device,
        dtype=dtype,  # type: ignore[arg-type]
        quantization=quantization,  # type: ignore[arg-type]
        max_model_len=max_model_len,
        num_threads=threads,
        cache=CacheConfig(
            kv_cache_memory=None if kv_cache_memory is None else parse_bytes(kv_cache_memory),
            prefix_caching=prefix_caching,
            kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
        ),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        speculation=SpeculationConfig.parse(speculation),
    )


def require_drafter(config: EngineConfig) -> None:
    """Raises ConfigError for an engine that drafts nothing, where plain and speculative are to be compared."""
    if config.speculation.method == "none":
        raise ConfigError("--speculation none leaves nothing to compare with plain decoding: try ngram.")


def require_writable(option: str, value: str) -> None:
    """Raises ConfigError, before anything is measured, for a path that no file can be written to."""
    path = Path(value).absolute()
    if path.is_dir():  # so is the empty path
        raise ConfigError(f"{option} {value!r} is a folder: give the name of a file.")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {value}: there is no such folder; create it first.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {value}: it cannot be written; choose another place.")


def parse_counts(option: str, text: str) -> list[int]:
    """Distinct numbers >= 1, ascending, from "1,2,4". Raises ConfigError for anything else."""
    if not re.fullmatch(r" *0*[1-9]\d{0,5} *(, *0*[1-9]\d{0,5} *)*", text, re.ASCII):
        raise ConfigError(f"{option} must be numbers from 1 to 999999, such as 1,2,4,8; got {text!r:.100}.")
    return sorted({int(number) for number in text.split(",")})


def parse_bytes(text: str, *, option: str = "--kv-cache-memory") -> int:
    """Bytes from 1048576, 512M, 1.5G or 2GiB; units are binary. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size_bytes = float(match[1]) * _UNITS[match[2].upper()] if match is not None else 0
    if not 1 <= size_bytes < 1 << 63:
        raise ConfigError(f"{option} must be a number of bytes such as 512M or 2G; got {text!r:.100}.")
    return int(size_bytes)


def open_stdin() -> TextIO:
    """Stdin. Raises ConfigError where the caller closed it."""
    if sys.stdin is None:
        raise ConfigError("stdin is closed: leave it open, or feed it from a file or a pipe.")
    return sys.stdin


def utf8_text(name: str, value: str | bytes) -> str:
    """An argument, or bytes of stdin, as text. Raises PromptError when it is not UTF-8."""
    try:
        return (value if isinstance(value, bytes) else value.encode(errors="surrogateescape")).decode()
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is not valid UTF-8 at byte {error.start}: convert it first.") from error
