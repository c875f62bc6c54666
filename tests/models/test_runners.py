"""Which engine is chosen, what it is given, and what happens where one is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import LLM, CacheConfig, EngineConfig
from paceline.errors import MissingDependencyError
from paceline.models import runners

NATIVE_REMEDY = "reinstall paceline where there is a C++20 compiler"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Decides which engines are there."""

    def install(*, native: bool, torch: bool) -> None:
        monkeypatch.setattr(runners, "native_available", lambda: native)
        monkeypatch.setattr(runners, "find_spec", lambda name: object() if torch else None)

    return install


def test_auto_is_native_on_a_cpu_where_it_is_built(installed) -> None:
    installed(native=True, torch=True)
    config = runners.resolve(EngineConfig())
    assert (config.engine, config.dtype, config.cache.kv_cache_dtype) == ("native", "auto", "int16")
    assert runners.kv_dtype(config) == "int16"
    config = runners.resolve(EngineConfig(quantization="int4", cache=CacheConfig(kv_cache_dtype="int8")))
    assert (config.engine, config.quantization, runners.kv_dtype(config)) == ("native", "int4", "int8")
    assert runners.resolve(config) == config
    assert runners.resolve(EngineConfig(device="cuda")).engine == "torch"
    assert runners.resolve(EngineConfig(engine="torch")).engine == "torch"


def test_auto_is_torch_elsewhere(installed) -> None:
    installed(native=False, torch=True)
    config = runners.resolve(EngineConfig())
    assert (config.engine, config.dtype, runners.kv_dtype(config)) == ("torch", "float32", "float32")
    assert runners.resolve(EngineConfig(device="cuda")).dtype == "bfloat16"
    assert runners.resolve(EngineConfig(dtype="bfloat16")).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("native", "torch", "options", "message"),
    [
        (False, True, {"engine": "native"}, f"the native engine is not in this installation: {NATIVE_REMEDY}, or take"),
        (
            False, True, {"quantization": "int8"},
            f"quantization needs the native engine, which is not in this installation: {NATIVE_REMEDY}, or drop it.",
        ),
        (False, True, {"cache": CacheConfig(kv_cache_dtype="int8")}, "kv_cache_dtype needs the native engine"),
        (True, False, {"engine": "torch"}, "the torch engine needs torch: pip install 'paceline[torch]'."),
        (True, False, {"device": "cuda"}, "the torch engine needs torch"),
        (
            False, False, {},
            "no engine is installed: pip install 'paceline[torch]' brings torch; for the native engine, reinstall ",
        ),
    ],
)  # fmt: skip
def test_engines_that_are_not_installed(installed, native: bool, torch: bool, options: dict, message: str) -> None:
    installed(native=native, torch=torch)
    with pytest.raises(MissingDependencyError) as caught:
        runners.resolve(EngineConfig(**options))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_card_of_the_torch_engine(tiny_llama: Path) -> None:
    config = EngineConfig(engine="torch", dtype="bfloat16", num_threads=1, cache=CacheConfig(kv_cache_memory=4 << 20))
    llm = LLM(tiny_llama, config=config)
    assert f"{tiny_llama}, float32 safetensors, torch engine in bfloat16; KV cache bfloat16 up to" in llm.model_card
    assert llm.config.engine == "torch"
