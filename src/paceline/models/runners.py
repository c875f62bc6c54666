"""Which engine runs a model: the choice, the runner it makes, and what a person is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from paceline.cache.budget import plan_blocks
from paceline.config import CacheConfig, EngineConfig
from paceline.errors import MissingDependencyError
from paceline.interfaces import Runner

if TYPE_CHECKING:
    from paceline.models.loader import LoadedModel
    from paceline.models.native_runner import NativeRunner
    from paceline.models.torch_runner import TorchRunner

_NATIVE_REMEDY = "reinstall paceline where there is a C++20 compiler"
_TORCH_REMEDY = "pip install 'paceline[torch]'"
_INSTRUCTION_SETS: Mapping[str, str] = {
    "avx512": "AVX-512 VNNI", "avx2vnni": "AVX-VNNI", "avx2": "AVX2", "portable": "portable code",
}  # fmt: skip


def resolve(config: EngineConfig) -> EngineConfig:
    """The same with engine and types that are no longer "auto"; the native engine's dtype "auto" is the file's own.

    Raises MissingDependencyError for an engine that is not installed.
    """
    engine = _choose(config)
    if engine == "native":
        kv_cache_dtype = "int16" if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
        return replace(config, engine=engine, cache=replace(config.cache, kv_cache_dtype=kv_cache_dtype))
    dtype = ("float32" if config.device == "cpu" else "bfloat16") if config.dtype == "auto" else config.dtype
    return replace(config, engine=engine, dtype=dtype)


def for_draft_model(config: EngineConfig, model: LoadedModel) -> EngineConfig:
    """The target's resolved config with the draft model's own engine, quantization and threads where speculation names
    them, and without a quantization that its file has already.

    Raises MissingDependencyError and ConfigError for what cannot be had.
    """
    rule = config.speculation
    own = replace(config, num_threads=rule.num_threads or config.num_threads)
    if rule.engine not in (None, config.engine):  # types are each engine's own
        cache = replace(own.cache, kv_cache_dtype="auto")
        own = replace(own, engine=rule.engine, dtype="auto", quantization=None, cache=cache)
    if rule.quantization is not None:
        own = replace(own, dtype="auto", quantization=rule.quantization)
    elif own.quantization is not None:
        from paceline.models.native_weights import is_quantised

        own = replace(own, quantization=None) if is_quantised(model) else own
    return config if own == config else resolve(own)


def create_runner(
    model: LoadedModel,
    config: EngineConfig,
    *,
    cache: CacheConfig,
    max_model_len: int | None,
    progress: bool,
    twin: Runner | None = None,
) -> Runner:
    """The model on the engine of a resolved config, with as many K/V blocks as the budget of `cache` pays for.

    progress: show a bar while weights are packed. twin: a runner of the same model and config; on the native engine
    both then have the same weights in memory. Raises as the runners do.
    """
    max_model_len = max_model_len or model.spec.context_length
    if config.engine == "native":
        return _native_runner(model, config, cache, max_model_len, progress=progress, twin=twin)
    return _torch_runner(model, config, cache, max_model_len)


def describe(model: LoadedModel, config: EngineConfig, runner: Runner) -> str:
    """Precision of the weights and what computes with them, for the model card."""
    if config.engine == "torch":
        return f"{model.precision}, torch engine in {config.dtype}"
    kept = config.quantization or (None if config.dtype == "auto" else config.dtype)
    weights = model.precision if kept is None else f"{kept} from {model.precision}"
    return f"{weights}, native engine ({_INSTRUCTION_SETS[runner.isa]})"  # type: ignore[attr-defined]  # NativeRunner's


def settings(config: EngineConfig) -> dict[str, Any]:
    """What a resolved config says of engine, types and drafting, for the JSON of a measurement."""
    return {
        "engine": config.engine,
        "device": config.device,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": kv_dtype(config),
        "threads": config.num_threads,
        "speculation": asdict(config.speculation) | {"num_speculative_tokens": config.speculation.max_draft_tokens},
    }


def kv_dtype(config: EngineConfig) -> str:
    """Type of K and V in the cache of a resolved config."""
    return config.cache.kv_cache_dtype if config.engine == "native" else config.dtype


def native_available() -> bool:
    """The C++ extension was built, and this machine can load it."""
    try:
        import_module("paceline._native")
    except ImportError:
        return False
    return True


def _choose(config: EngineConfig) -> str:
    wants_native = config.engine == "native" or (config.engine == "auto" and config.device == "cpu")
    if wants_native and native_available():
        return "native"
    if config.engine == "native":
        raise MissingDependencyError(
            f"the native engine is not in this installation: {_NATIVE_REMEDY}, or take engine torch."
        )
    if config.native_options:  # torch would ignore them
        raise MissingDependencyError(
            f"{config.native_options[0]} needs the native engine, which is not in this installation: "
            f"{_NATIVE_REMEDY}, or drop it."
        )
    if find_spec("torch") is None:
        if config.engine == "torch" or not wants_native:
            raise MissingDependencyError(f"the torch engine needs torch: {_TORCH_REMEDY}.")
        raise MissingDependencyError(
            f"no engine is installed: {_TORCH_REMEDY} brings torch; for the native engine, {_NATIVE_REMEDY}."
        )
    return "torch"


def _native_runner(
    model: LoadedModel,
    config: EngineConfig,
    cache: CacheConfig,
    max_model_len: int,
    *,
    progress: bool,
    twin: Runner | None,
) -> NativeRunner:
    from paceline.models.native_runner import NativeRunner, kv_bytes_per_block
    from paceline.models.native_weights import pack_model

    assert cache.kv_cache_dtype != "auto", "the config was resolved"
    # First the weights: a share of the memory that they leave free becomes the K/V cache
    if isinstance(twin, NativeRunner):
        weights = twin.weights
    else:
        weights = pack_model(model, dtype=config.dtype, quantization=config.quantization, progress=progress)
    num_blocks = plan_blocks(
        cache,
        bytes_per_block=kv_bytes_per_block(
            model.spec, block_size=cache.block_size, kv_cache_dtype=cache.kv_cache_dtype
        ),
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
    )
    return NativeRunner(
        model.spec,
        weights,
        num_blocks=num_blocks,
        block_size=cache.block_size,
        max_model_len=max_model_len,
        kv_cache_dtype=cache.kv_cache_dtype,
        num_threads=config.num_threads,
    )


def _torch_runner(model: LoadedModel, config: EngineConfig, cache: CacheConfig, max_model_len: int) -> TorchRunner:
    from paceline.models.torch_runner import TorchRunner, free_device_bytes, kv_bytes_per_block

    assert config.dtype != "auto", "the config was resolved"
    num_blocks = plan_blocks(
        cache,
        bytes_per_block=kv_bytes_per_block(model.spec, block_size=cache.block_size, dtype=config.dtype),
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        free_bytes=free_device_bytes(config.device),
    )
    return TorchRunner(
        model.spec,
        model.weights,
        num_blocks=num_blocks,
        block_size=cache.block_size,
        max_model_len=max_model_len,
        dtype=config.dtype,
        device=config.device,
        num_threads=config.num_threads,
    )
