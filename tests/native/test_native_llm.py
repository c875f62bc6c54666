"""What the native engine makes of a model's own precision, of quantization, and of a draft model's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline import LLM, CacheConfig, EngineConfig, SamplingParams, SpeculationConfig
from paceline.errors import ConfigError
from paceline.models import native_weights, runners
from paceline.models.loader import load

SMALL = CacheConfig(kv_cache_memory=4 << 20)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, "float32 safetensors"),
        ({"dtype": "bfloat16"}, "bfloat16 from float32 safetensors"),
        ({"quantization": "int8"}, "int8 from float32 safetensors"),
        ({"quantization": "int4"}, "int4 from float32 safetensors"),
    ],
)
def test_model_card(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, options: dict, weights: str) -> None:
    monkeypatch.setenv("PACELINE_ISA", "portable")
    llm = LLM(tiny_llama, config=EngineConfig(**options, num_threads=1, cache=SMALL))
    assert f"{tiny_llama}, {weights}, native engine (portable code); KV cache int16 up to" in llm.model_card
    assert llm.generate("ab", SamplingParams(max_tokens=3))[0].finished


def test_int8_keys_and_values_take_less_memory(tiny_llama: Path) -> None:
    pools = [
        LLM(tiny_llama, config=EngineConfig(num_threads=1, cache=CacheConfig(kv_cache_dtype=kv))).runner.kv
        for kv in ("int16", "int8")
    ]
    assert pools[1].bytes_per_block < pools[0].bytes_per_block


def test_a_draft_model_keeps_the_quants_of_its_file(smollm2, tiny_llama: Path) -> None:
    config = runners.resolve(EngineConfig(quantization="int8"))
    assert runners.for_draft_model(config, smollm2).quantization is None
    assert runners.for_draft_model(config, load(str(tiny_llama))) is config
    with pytest.raises(ConfigError, match=r"smollm2-135m is 4-bit GGUF .* already: drop it"):
        LLM(smollm2, config=config)


def test_a_draft_model_may_have_its_own_engine_and_weights(tiny_llama: Path) -> None:
    tiny = load(str(tiny_llama))
    target = runners.resolve(EngineConfig(engine="native", dtype="float32", cache=CacheConfig(kv_cache_dtype="int8")))

    def own(model, **options) -> EngineConfig:
        rule = SpeculationConfig(method="draft_model", model="m", **options)
        return runners.for_draft_model(replace(target, speculation=rule), model)

    assert own(tiny).cache.kv_cache_dtype == "int8"
    torch = own(tiny, engine="torch", num_threads=1)
    assert (torch.engine, torch.dtype, torch.num_threads) == ("torch", "float32", 1)
    quantised = own(tiny, quantization="int8")
    assert (quantised.engine, quantised.dtype, quantised.quantization) == ("native", "auto", "int8")
    with pytest.raises(ConfigError, match="quantization is read by the native engine only"):
        own(tiny, engine="torch", quantization="int8")


def test_target_and_draft_model_are_quantised_alike(tiny_llama: Path) -> None:
    speculation = {"method": "draft_model", "model": str(tiny_llama)}
    config = EngineConfig(quantization="int4", num_threads=1, cache=SMALL)
    llm = LLM(str(tiny_llama), config=config, speculation=speculation)
    output = llm.generate("ab ab", SamplingParams(max_tokens=20, ignore_eos=True))[0]
    assert "recovered" not in output.outputs[0].origins
    assert output.metrics.num_accepted_tokens > 10


def test_a_model_that_drafts_for_itself_is_in_memory_once(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    pack_model = native_weights.pack_model
    monkeypatch.setattr(native_weights, "pack_model", lambda *a, **k: packed.append(a) or pack_model(*a, **k))
    speculation = {"method": "draft_model", "model": str(tiny_llama)}
    LLM(str(tiny_llama), config=EngineConfig(num_threads=1, cache=SMALL), speculation=speculation)
    assert len(packed) == 1


def test_token_ids_of_several_prompts_may_differ_in_number(tiny_llama: Path) -> None:
    llm = LLM(tiny_llama, config=EngineConfig(num_threads=1))
    prompts = [[5, 6, 7], [8], "ab"]
    together = llm.generate(prompts, SamplingParams(max_tokens=4))
    alone = [llm.generate(prompt, SamplingParams(max_tokens=4))[0] for prompt in prompts]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
