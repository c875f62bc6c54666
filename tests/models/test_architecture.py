"""ModelSpec from Hugging Face configs, old and new, and from GGUF metadata; what is not implemented is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.errors import CorruptFileError, UnsupportedModelError
from paceline.models.architecture import FAMILIES, ModelSpec
from paceline.models.rope import RopeSpec, inverse_frequencies

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.context_length": 2048,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10_000.0,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": 100,
}


def gguf(architecture: str, **options: object) -> dict:
    renamed = {key.replace("llama.", f"{architecture}."): value for key, value in GGUF.items()}
    extra = {f"{architecture}.{key.replace('__', '.')}": value for key, value in options.items()}
    return {**renamed, "general.architecture": architecture, **extra}


def test_a_config_and_its_gguf_agree() -> None:
    spec = ModelSpec.from_hf_config(LLAMA)
    assert spec == ModelSpec.from_gguf(GGUF, tensor_names={"output.weight", "token_embd.weight"})
    assert (spec.head_dim, spec.attention_scale, spec.context_length) == (16, 0.25, 2048)
    assert not spec.tied_embeddings
    assert spec.ropes == (RopeSpec(theta=10_000.0, dim=16, original_max_position=2048),) * 4
    assert spec.windows == (None,) * 4


def test_gguf_tensors_tell_of_biases_and_of_the_head() -> None:
    assert ModelSpec.from_gguf(GGUF, tensor_names={"token_embd.weight"}).tied_embeddings
    names = {"output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias"}
    spec = ModelSpec.from_gguf(GGUF, tensor_names=names)
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.tied_embeddings) == (True, True, False, False)
    assert ModelSpec.from_gguf(gguf("qwen2")).qkv_bias


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                    "rope_theta": 10_000.0,
                }
            },
        ),
    ],
)
def test_old_and_new_spelling_of_rope_agree(old: dict, new: dict) -> None:
    assert ModelSpec.from_hf_config({**LLAMA, **old}) == ModelSpec.from_hf_config({**LLAMA, **new})


def test_gemma3_alternates_windows_and_thetas_in_all_three_spellings() -> None:
    gemma = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 16, "sliding_window": 512}
    gemma |= {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
    old = ModelSpec.from_hf_config({**gemma, "rope_theta": 1e6, "rope_local_base_freq": 1e4})
    kinds = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    new = ModelSpec.from_hf_config(
        {
            **gemma,
            "layer_types": kinds,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    )
    assert old == new
    assert list(old.windows) == [512] * 5 + [None, 512]
    assert [r.theta for r in old.ropes if r] == [1e4] * 5 + [1e6, 1e4]
    assert old.embedding_scale == 8.0
    metadata = gguf("gemma3", attention__sliding_window=512, rope__freq_base=1e6, attention__key_length=16)
    metadata["gemma3.block_count"] = 7
    from_gguf = ModelSpec.from_gguf(metadata)
    assert (from_gguf.windows, [r.theta for r in from_gguf.ropes if r]) == (old.windows, [1e4] * 5 + [1e6, 1e4])
    assert (from_gguf.tied_embeddings, from_gguf.sandwich_norms, from_gguf.qk_norm) == (True, True, True)


def test_windows_of_the_families() -> None:
    assert ModelSpec.from_hf_config({**LLAMA, "model_type": "mistral", "sliding_window": 99}).windows == (99,) * 4
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 99, "max_window_layers": 3}
    assert ModelSpec.from_hf_config(qwen).windows == (None,) * 4
    assert ModelSpec.from_hf_config({**qwen, "use_sliding_window": True}).windows == (None, None, None, 99)


def test_smollm3_leaves_rope_out_of_every_fourth_layer() -> None:
    spec = ModelSpec.from_hf_config({**LLAMA, "model_type": "smollm3"})
    assert [r is not None for r in spec.ropes] == [True, True, True, False]
    assert [r is not None for r in ModelSpec.from_gguf(gguf("smollm3")).ropes] == [True, True, True, False]


@pytest.mark.parametrize("spelling", ["longrope", "su", "yarn"])
def test_phi3_longrope_in_all_spellings(spelling: str) -> None:
    factors = [float(i) for i in range(1, 7)]
    config = {
        **LLAMA, "model_type": "phi3", "original_max_position_embeddings": 512, "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": spelling, "short_factor": factors, "long_factor": factors},
    }  # fmt: skip
    rope = ModelSpec.from_hf_config(config).ropes[0]
    assert rope is not None
    assert (rope.scaling, rope.dim, rope.factor, rope.original_max_position) == ("longrope", 12, 4.0, 512)
    _, attention_factor = inverse_frequencies(rope, max_model_len=2048, weights={})
    assert attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(512)))


def test_gguf_longrope_takes_its_factors_from_the_weights() -> None:
    metadata = gguf(
        "phi3", rope__dimension_count=4, rope__scaling__original_context_length=512, rope__scaling__attn_factor=1.19
    )
    rope = ModelSpec.from_gguf(metadata).ropes[0]
    assert rope is not None
    weights = {
        "rope_factors_long.weight": np.array([1.0, 8.0], np.float32),
        "rope_factors_short.weight": np.array([1.0, 2.0], np.float32),
    }
    inverse, attention_factor = inverse_frequencies(rope, max_model_len=513, weights=weights)
    np.testing.assert_allclose(inverse, [1.0, 0.01 / 8], rtol=1e-6)
    assert attention_factor == 1.19
    inverse, _ = inverse_frequencies(rope, max_model_len=512, weights=weights)
    np.testing.assert_allclose(inverse, [1.0, 0.01 / 2], rtol=1e-6)
    with pytest.raises(CorruptFileError, match=r"no rope_factors_long\.weight"):
        inverse_frequencies(rope, max_model_len=513, weights={})
    with pytest.raises(CorruptFileError, match="must hold 2 factors"):
        inverse_frequencies(rope, max_model_len=513, weights={"rope_factors_long.weight": np.ones(3)})


def test_llama3_factors_in_a_gguf_equal_the_formula() -> None:
    """Converters write Llama 3's scaling as divisors of the frequencies."""
    plain = RopeSpec(theta=500_000.0, dim=128)
    scaled = RopeSpec(theta=500_000.0, dim=128, scaling="llama3", factor=8.0, original_max_position=8192)
    formula, _ = inverse_frequencies(scaled, max_model_len=131_072, weights={})
    unscaled, _ = inverse_frequencies(plain, max_model_len=131_072, weights={})
    divisors = unscaled / formula
    assert divisors[0] == 1.0
    assert divisors[-1] == pytest.approx(8.0)
    from_weights, _ = inverse_frequencies(plain, max_model_len=131_072, weights={"rope_freqs.weight": divisors})
    np.testing.assert_allclose(from_weights, formula, rtol=1e-6)


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 256}, 2048),
    ],
)
def test_scaling_stretches_the_context(rope: dict, context: int) -> None:
    assert ModelSpec.from_hf_config({**LLAMA, "rope_parameters": rope}).context_length == context


def test_gguf_yarn() -> None:
    spec = ModelSpec.from_gguf(
        gguf(
            "qwen2", rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=2048
        )
    )
    assert spec.context_length == 8192
    rope = spec.ropes[0]
    assert rope is not None
    assert (rope.scaling, rope.factor) == ("yarn", 4.0)
    assert inverse_frequencies(rope, max_model_len=8192, weights={})[1] == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported"),
        ({"model_type": "mixtral"}, "architecture 'mixtral' is not supported"),
        ({"num_experts": 8}, r"experts \(MoE\)"),
        ({"vision_config": {}}, "image or audio tower"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
        ({"hidden_act": "relu2"}, "activation 'relu2' is not supported"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "rope scaling 'mrope' is not supported"),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["linear_attention"],
            },
            "linear layers",
        ),
    ],
)
def test_what_is_not_implemented_is_refused(config: dict, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        ModelSpec.from_hf_config({**LLAMA, **config})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["mamba", "llama4", "qwen3moe"])
def test_an_unknown_architecture_lists_the_supported_ones(name: str) -> None:
    for read, source in ((ModelSpec.from_gguf, gguf(name)), (ModelSpec.from_hf_config, {**LLAMA, "model_type": name})):
        with pytest.raises(UnsupportedModelError) as caught:
            read(source)
        assert name in str(caught.value)
        assert all(family in str(caught.value) for family in FAMILIES)


def test_gguf_with_experts_or_uneven_heads_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="MoE"):
        ModelSpec.from_gguf(gguf("llama", expert_count=8))
    with pytest.raises(UnsupportedModelError, match="different widths"):
        ModelSpec.from_gguf(gguf("llama", attention__key_length=16, attention__value_length=8))


def scaled(kind: str, **options: object) -> dict:
    return {"rope_scaling": {"rope_type": kind, "factor": 2.0, **options}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"vocab_size": 0}, "vocab_size must be an integer of at least 1; got 0"),
        ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads; got 4 and 3"),
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, "even part of 16; got 3"),
        ({"architectures": {"a": 1}}, "architectures must be a list of names; got {'a': 1}"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1; got 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer of at least 1; got True"),
        ({"max_position_embeddings": 1.5}, "max_position_embeddings must be an integer of at least 1; got 1.5"),
        ({"max_position_embeddings": math.nan}, "max_position_embeddings must be an integer of at least 1; got nan"),
        ({"head_dim": 16.5}, "head_dim must be an integer of at least 1; got 16.5"),
        ({"rms_norm_eps": ["x"]}, r"norm_eps must be a number above 0; got \['x'\]"),
        ({"rms_norm_eps": 10**400}, "norm_eps must be a number above 0; got 1000"),
        ({"rope_theta": math.inf}, "rope_theta must be a number above 1; got inf"),
        (scaled("yarn", beta_fast=0), "rope beta_fast must be a number above 0; got 0"),
        (scaled("yarn", beta_fast="x"), "rope beta_fast must be a number above 0; got 'x'"),
        (
            scaled("yarn", original_max_position_embeddings=1.5),
            "original_max_position must be an integer of at least 2",
        ),
        (scaled("llama3", low_freq_factor=4.0), "rope high_freq_factor must be a number above 4; got 4.0"),
        (scaled("longrope", long_factor=["x"]), "rope long_factor must be a number above 0; got 'x'"),
        (scaled("longrope", attention_factor=0), "rope attention_factor must be a number above 0; got 0"),
        ({"model_type": "mistral", "sliding_window": 1.5}, "sliding window must be an integer of at least 1; got 1.5"),
        ({"model_type": "gemma2", "final_logit_softcapping": "x"}, "final_softcap must be a number above 0; got 'x'"),
    ],
)
def test_malformed_configs_are_refused(change: dict, message: str) -> None:
    config = {key: value for key, value in {**LLAMA, **change}.items() if value is not None}
    with pytest.raises(CorruptFileError, match=message):
        ModelSpec.from_hf_config(config)


def test_a_null_where_a_number_belongs_is_refused() -> None:
    for read, source in (
        (ModelSpec.from_hf_config, {**LLAMA, "rms_norm_eps": None}),
        (ModelSpec.from_gguf, gguf("llama", attention__layer_norm_rms_epsilon=None)),
    ):
        with pytest.raises(CorruptFileError, match="norm_eps must be a number above 0; got None"):
            read(source)


def test_gguf_without_a_required_key_is_refused() -> None:
    metadata = {key: value for key, value in GGUF.items() if key != "llama.block_count"}
    with pytest.raises(CorruptFileError, match=r"llama\.block_count must be an integer of at least 1; got None"):
        ModelSpec.from_gguf(metadata)
