"""Frozen settings of an engine. Each field's comment is its documentation."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

DType = Literal["auto", "float32", "bfloat16"]
Engine = Literal["auto", "torch", "native"]
Quantization = Literal["int8", "int4"]
KVCacheDType = Literal["auto", "int16", "int8"]
Rule = Literal["coupled", "rejection", "block", "typical"]
Control = Literal["auto", "fixed"]

METHODS = ("none", "auto", "ngram", "suffix", "recycle", "draft_model", "layer_skip")  # the built-in ones
PLUG_INS = "paceline.drafters"  # group of the entry points by which installed packages name their drafters
MAX_DRAFT_TOKENS = 64  # no drafter is right often enough for more to pay
MAX_WIDTH = 8  # candidates of a row that a draft model ranks
LEAST_REACH = 0.2  # what a draft model's pass and a row of the target's cost of a pass over one token, with AVX-512

_PLUG_IN = "plug-in"  # stands for any method that is not built in
_DRAFTING = (*METHODS[1:], _PLUG_IN)
_DRAFT_TOKENS = {"none": 0, "auto": 16, "ngram": 5, "draft_model": 5, "layer_skip": 2}  # by default; 8 of all others
_PREDICTED_TOKENS = 32  # half of them are worth a sixth less where predictions are good (docs/design-notes.md)
_READ_BY_METHODS: Mapping[str, tuple[str, ...]] = {  # options that only some methods read
    "num_speculative_tokens": _DRAFTING,
    "verification": _DRAFTING,
    "options": (_PLUG_IN,),
    "control": _DRAFTING,
    "max_ngram": ("ngram",),
    "min_ngram": ("ngram",),
    "store_tokens": ("suffix",),
    "table": ("recycle",),
    "layers": ("layer_skip",),
    "model": ("auto", "draft_model"),
    "width": ("draft_model",),
    "least_reach": ("draft_model",),
    "force": ("draft_model",),
    "engine": ("draft_model",),
    "quantization": ("draft_model",),
    "num_threads": ("draft_model",),
    "kv_cache_memory": ("draft_model",),
    "prefix_caching": ("draft_model",),
}
_READ_BY_RULES: Mapping[str, tuple[str, ...]] = {  # options that only some verification rules read
    "least_reach": ("coupled",),  # others would be biased by drafts that end for what was drawn
    "typical_epsilon": ("typical",),
    "typical_alpha": ("typical",),
}


def one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ConfigError, listing the choices, unless value is one of them."""
    if not (isinstance(value, str) and value in choices):  # an array has no truth value
        nearest = [*difflib.get_close_matches(str(value), choices, n=1), choices[0]][0]
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r:.100}: try {nearest}.")


def at_least(name: str, value: object, minimum: int, *, example: int | None = None) -> None:
    """Raises ConfigError unless value is an integer >= minimum; the message proposes the example, or the minimum."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        remedy = f"try {minimum if example is None else example}"
        raise ConfigError(f"{name} must be an integer >= {minimum}; got {value!r:.100}: {remedy}.")


def _ascending(name: str, value: object) -> tuple[int, ...]:
    """Raises ConfigError unless value is a sequence of ascending integers >= 0, at least one."""
    items = list(value) if isinstance(value, (list, tuple)) else []
    whole = all(isinstance(item, int) and not isinstance(item, bool) for item in items)
    if not (items and whole and items[0] >= 0 and items == sorted(set(items))):
        raise ConfigError(f"{name} must be ascending integers >= 0; got {value!r:.100}: try [0, 1, 3].")
    return tuple(items)


def installed_plug_ins() -> dict[str, EntryPoint]:
    """The drafters that installed packages bring, by name."""
    from importlib.metadata import entry_points  # here, for most never need it

    return {entry.name: entry for entry in entry_points(group=PLUG_INS)}


def is_plug_in_path(method: str) -> bool:
    """It names a class as package.module:Class."""
    return re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", method) is not None


def usable_cores() -> int:
    """Cores that this process may use: the threads of an engine unless num_threads says otherwise."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged K/V cache."""

    block_size: int = 16  # tokens of a block, a power of two
    kv_cache_memory: int | None = (
        None  # bytes; None = a quarter of the free memory, at most what max_num_seqs full contexts need
    )
    prefix_caching: bool = True  # reuse full blocks whose token prefix was computed before
    kv_cache_dtype: KVCacheDType = "auto"  # native engine: auto = int16; the torch engine's K/V follow dtype

    def __post_init__(self) -> None:
        one_of("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDType))
        at_least("block_size", self.block_size, 1, example=16)
        if self.block_size & (self.block_size - 1):
            below = 1 << (self.block_size.bit_length() - 1)
            raise ConfigError(f"block_size must be a power of two; got {self.block_size}. Try {below} or {2 * below}.")
        if self.kv_cache_memory is not None:
            at_least("kv_cache_memory", self.kv_cache_memory, 1, example=1 << 30)
        if not isinstance(self.prefix_caching, bool):
            raise ConfigError(f"prefix_caching must be True or False; got {self.prefix_caching!r}.")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Who gets into a step."""

    max_num_seqs: int = 16  # sequences that run at once
    max_num_batched_tokens: int = 512  # of a pass; longer prompts come in chunks: no decoding waits longer than for one

    def __post_init__(self) -> None:
        at_least("max_num_seqs", self.max_num_seqs, 1)
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1, example=512)


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """What drafts, how much, and which rule verifies. `parse` reads the JSON of --speculation."""

    method: str = "ngram"  # of METHODS, or package.module:Class, or an entry point; a hybrid joins several by +
    num_speculative_tokens: int | None = None  # nodes of a draft at most, 1..64; None = the method's own default
    control: Control | None = None  # auto: as much as pays by measured cost; fixed: always as much; None = by method
    verification: Rule = "coupled"  # the first three are lossless; typical is not
    max_ngram: int = 4  # ngram: longest suffix that is looked up
    min_ngram: int = 2  # ngram: shortest
    store_tokens: int = 0  # suffix: tokens of past outputs that all requests draft from, too
    table: str | None = None  # recycle: file that its table is read from and, at LLM.close, saved to; None = none
    model: str | None = None  # draft_model, and a further drafter of auto: catalog name, folder, GGUF file or hub id
    width: int = 1  # draft_model: children of a node; 1 = drafts are chains
    least_reach: float = LEAST_REACH  # draft_model: chance with which a node must be reached to be drafted
    force: bool = False  # draft_model: draft also where it has few of the target's tokens
    engine: Engine | None = None  # draft_model: what runs its passes; None = the target's engine
    quantization: Quantization | None = None  # draft_model: quantise its weights; None = as the target's
    num_threads: int | None = None  # draft_model: CPU threads of its passes; None = as many as the target's
    kv_cache_memory: int | None = None  # draft_model: bytes of its own K/V cache
    prefix_caching: bool | None = None  # draft_model: reuse its full K/V blocks; None = as the target's
    layers: tuple[int, ...] | None = None  # layer_skip: those that run; None = tune-layers' choice, or a default
    options: Mapping[str, Any] | None = None  # plug-in: keyword arguments of its class
    typical_epsilon: float = 0.3  # typical: absolute threshold
    typical_alpha: float = 0.09  # typical: entropy-scaled threshold

    def __post_init__(self) -> None:
        _check_methods(self.method)
        object.__setattr__(self, "method", "+".join(name.strip() for name in self.method.split("+")))
        if self.control is not None:
            one_of("control", self.control, get_args(Control))
        one_of("verification", self.verification, get_args(Rule))
        if len(self.methods) > 1 and self.verification != "coupled":
            raise ConfigError(
                f"method {self.method!r} makes one tree of several drafts; verification {self.verification!r} takes "
                "chains of a single drafter: take coupled, or one method."
            )
        if self.num_speculative_tokens is not None:
            at_least("num_speculative_tokens", self.num_speculative_tokens, 1, example=5)
            if self.num_speculative_tokens > MAX_DRAFT_TOKENS:
                raise ConfigError(
                    f"num_speculative_tokens must be at most {MAX_DRAFT_TOKENS}; got {self.num_speculative_tokens}: "
                    f"try {_DRAFT_TOKENS.get(self.method, 8)}."
                )
        at_least("store_tokens", self.store_tokens, 0, example=100_000)
        if self.table is not None and not (isinstance(self.table, str) and self.table):
            raise ConfigError(f"table must be the name of a file; got {self.table!r:.100}: try 'recycle.npz'.")
        at_least("min_ngram", self.min_ngram, 1)
        at_least("max_ngram", self.max_ngram, 1)
        if self.max_ngram < self.min_ngram:
            raise ConfigError(
                f"max_ngram must be at least min_ngram; got max_ngram {self.max_ngram} and min_ngram {self.min_ngram}: "
                "set both."
            )
        if self.model is not None and not (isinstance(self.model, str) and self.model):
            raise ConfigError(f"model must be a catalog name, folder, GGUF file or hub id; got {self.model!r}.")
        if "draft_model" in self.methods and self.model is None:
            raise ConfigError('method "draft_model" needs "model": a catalog name, folder, GGUF file or hub id.')
        if self.layers is not None:
            object.__setattr__(self, "layers", _ascending("layers", self.layers))
        self._check_draft_model()
        for name in ("typical_epsilon", "typical_alpha"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
                raise ConfigError(f"{name} must be a number in (0, 1]; got {value!r}.")
        self._refuse_unread(f.name for f in fields(self) if getattr(self, f.name) != f.default)
        self._check_options()

    def _check_draft_model(self) -> None:
        at_least("width", self.width, 1)
        if self.width > 1 and self.verification != "coupled":
            raise ConfigError(
                f"width {self.width} makes drafts trees; verification {self.verification!r} takes chains: take "
                "coupled, or width 1."
            )
        reach = self.least_reach
        if not isinstance(reach, (int, float)) or isinstance(reach, bool) or not 0 <= reach < 1:
            raise ConfigError(f"least_reach must be a number in [0, 1); got {reach!r:.100}: try 0.2.")
        if self.width > MAX_WIDTH:
            raise ConfigError(f"width must be at most {MAX_WIDTH}; got {self.width}: try 3.")
        if self.engine is not None:
            one_of("engine", self.engine, get_args(Engine))
        if self.quantization is not None:
            one_of("quantization", self.quantization, get_args(Quantization))
        if self.num_threads is not None:
            at_least("num_threads", self.num_threads, 1)
        if self.kv_cache_memory is not None:
            at_least("kv_cache_memory", self.kv_cache_memory, 1, example=1 << 30)
        for name, choices in (("force", (True, False)), ("prefix_caching", (True, False, None))):
            if not any(getattr(self, name) is choice for choice in choices):
                rule = " or ".join(map(str, choices))
                raise ConfigError(f"{name} must be {rule}; got {getattr(self, name)!r:.100}: leave it out.")

    @property
    def methods(self) -> tuple[str, ...]:
        """The method, or those that a hybrid or auto joins."""
        if self.method != "auto":
            return tuple(self.method.split("+"))
        model = () if self.model is None else ("draft_model",)
        if self.verification != "coupled":  # chains of a single drafter
            return model or ("suffix",)
        return ("suffix", "recycle", *model)

    @property
    def adaptive(self) -> bool:
        """How much is drafted follows what it costs and brings."""
        return (self.control or ("auto" if self.method == "auto" else "fixed")) == "auto"

    @property
    def max_draft_tokens(self) -> int:
        """num_speculative_tokens, or the method's default."""
        return self.num_speculative_tokens or _DRAFT_TOKENS.get(self.method, 8)

    @property
    def max_predicted_tokens(self) -> int:
        """num_speculative_tokens, or the default where a request says what its output will resemble."""
        return self.num_speculative_tokens or _PREDICTED_TOKENS

    def _kinds(self) -> tuple[str, ...]:
        named = tuple(name if name in METHODS else _PLUG_IN for name in self.methods)
        return ("auto", *named) if self.method == "auto" else named

    def _check_options(self) -> None:
        if self.options is None:
            return
        if not (isinstance(self.options, Mapping) and all(isinstance(name, str) for name in self.options)):
            raise ConfigError(f"options must be keyword arguments of the plug-in, by name; got {self.options!r:.100}.")
        if self._kinds().count(_PLUG_IN) > 1:
            raise ConfigError(
                f"options cannot tell the plug-ins of {self.method!r} apart: give them defaults, or derive classes."
            )

    def _refuse_unread(self, given: Iterable[str]) -> None:
        """Raises ConfigError for an option that the chosen method or rule would ignore."""
        for name in given:
            for chooser, chosen, kinds, readers in (
                ("method", self.method, self._kinds(), _READ_BY_METHODS.get(name)),
                ("verification", self.verification, (self.verification,), _READ_BY_RULES.get(name)),
            ):
                if readers is not None and not set(readers) & set(kinds):
                    raise ConfigError(
                        f"{name} is read with {chooser} {' or '.join(readers)} only; {chooser} {chosen!r} would ignore "
                        "it: drop it."
                    )

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | SpeculationConfig | None) -> SpeculationConfig:
        """From "none", "auto", any other method, JSON text, or a mapping such as {"method": "ngram"}.

        Raises ConfigError for text that is not JSON, and for an unknown method or key.
        """
        if isinstance(value, SpeculationConfig):
            return value
        if value is None:
            return cls(method="none")
        if isinstance(value, str):
            text = value.strip()
            if text.startswith("{"):
                try:
                    value = json.loads(text)
                except (ValueError, RecursionError) as error:  # also thousands of digits or of brackets
                    raise ConfigError(
                        f'speculation is not valid JSON ({error}). Try \'{{"method": "ngram"}}\'.'
                    ) from error
            else:
                value = {"method": text}
        if not isinstance(value, Mapping):
            raise ConfigError(f"speculation must be a name or a JSON object; got {value!r}.")
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(value) - known, key=str)
        if unknown:
            raise ConfigError(f"speculation has no option {unknown[0]!r}; it has {', '.join(sorted(known))}.")
        config = cls(**value)
        config._refuse_unread(value)  # also those given as their default
        return config


def _check_methods(method: object) -> None:
    """Raises ConfigError unless each of the names joined by + is a built-in method or may be a plug-in."""
    names = [name.strip() for name in method.split("+")] if isinstance(method, str) else [repr(method)]
    for name in names:
        if name in METHODS or is_plug_in_path(name):
            continue
        choices = (*METHODS, *installed_plug_ins())
        if name in choices:
            continue
        nearest = [*difflib.get_close_matches(name, choices, n=1), choices[0]][0]
        raise ConfigError(
            f"method must be one of {', '.join(choices)}, some of them joined by +, or a plug-in as "
            f"package.module:Class; got {name!r:.100}: try {nearest}."
        )
    for name in names:
        if len(names) > 1 and name in ("none", "auto"):
            raise ConfigError(f"method {name!r} stands alone; got {method!r:.100}: drop it, or the others.")
        if names.count(name) > 1:
            raise ConfigError(f"method {method!r:.100} names {name!r} more than once: once is enough.")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built from, but for the model's name."""

    engine: Engine = "auto"  # what runs the passes; auto = native on a CPU where it is built, else torch
    dtype: DType = (
        "auto"  # of the weights; auto: native keeps the file's own, torch takes float32 on a CPU, else bfloat16
    )
    quantization: Quantization | None = None  # native: quantise the weights of a float checkpoint
    device: str = "cpu"  # any torch device; the native engine runs on cpu
    max_model_len: int | None = (
        None  # tokens a sequence may hold; None = the model's context, or less if the K/V budget is less
    )
    num_threads: int | None = None  # CPU threads of a pass; None = the cores this process may use
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=lambda: SpeculationConfig(method="none"))

    def __post_init__(self) -> None:
        one_of("engine", self.engine, get_args(Engine))
        one_of("dtype", self.dtype, get_args(DType))
        if self.quantization is not None:
            one_of("quantization", self.quantization, get_args(Quantization))
        if not (isinstance(self.device, str) and self.device):
            raise ConfigError(f"device must be a torch device such as cpu or cuda:0; got {self.device!r}.")
        if self.max_model_len is not None:
            at_least("max_model_len", self.max_model_len, 2, example=2048)
        if self.num_threads is not None:
            at_least("num_threads", self.num_threads, 1)
        for name, kind in (("cache", CacheConfig), ("scheduler", SchedulerConfig), ("speculation", SpeculationConfig)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} must be a {kind.__name__}; got {getattr(self, name)!r}.")
        self._refuse_unread()

    def _refuse_unread(self) -> None:
        """Raises ConfigError for an option that the chosen engine would ignore."""
        if self.engine == "native" and self.device != "cpu":
            raise ConfigError(f"the native engine runs on cpu only; got device {self.device!r}: try engine torch.")
        if self.quantization is not None and self.dtype != "auto":
            raise ConfigError(
                f"quantization {self.quantization!r} and dtype {self.dtype!r} both say how weights are kept: drop one."
            )
        if self.native_options and (self.engine == "torch" or self.device != "cpu"):
            raise ConfigError(
                f"{self.native_options[0]} is read by the native engine only; engine {self.engine!r} on device "
                f"{self.device!r} would ignore it: drop it, or take engine native on cpu."
            )

    @property
    def native_options(self) -> tuple[str, ...]:
        """Names of the options set here that only the native engine can honour."""
        quantization = ("quantization",) if self.quantization is not None else ()
        return quantization + (("kv_cache_dtype",) if self.cache.kv_cache_dtype != "auto" else ())
