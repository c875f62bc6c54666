"""Canonical names and layouts: the same model from GGUF and from safetensors, and what both refuse."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gguf_writing import finish, write_tiny_gguf
from paceline.errors import CorruptFileError, UnsupportedModelError
from paceline.models.architecture import ModelSpec
from paceline.models.gguf_file import GGUFFile
from paceline.models.gguf_weights import gguf_weights
from paceline.models.loader import load
from paceline.models.safetensors_file import SafetensorsFolder, safetensors_weights
from paceline.models.weights import expected_shapes

CONFIG = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip


def _spec(name: str, **changes) -> ModelSpec:
    return ModelSpec.from_hf_config({**CONFIG, "model_type": name, **changes})


def _transformers_weights(spec_name: str, **changes) -> dict[str, torch.Tensor]:
    """State dict of a small random transformers model, norms included, as its checkpoint would have it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(spec_name, **{**CONFIG, "pad_token_id": 0, **changes})
    model = AutoModelForCausalLM.from_config(config)
    weights = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return weights


def _save(folder: Path, weights: dict[str, torch.Tensor], *, dtype=torch.float32) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: value.to(dtype).contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def test_gguf_is_brought_back_to_rotate_half_layout(tmp_path):
    expected = write_tiny_gguf(tmp_path / "tiny.gguf")
    loaded = load(str(tmp_path / "tiny.gguf"))
    assert set(loaded.weights) == set(expected)
    for name, values in loaded.weights.items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
        assert not values.flags.writeable


def test_reading_from_many_threads(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    weights = load(str(tmp_path / "tiny.gguf")).weights
    once = {name: values.copy() for name, values in weights.items()}
    names = [*weights] * 20
    with ThreadPoolExecutor(8) as pool:
        for name, values in zip(names, pool.map(weights.__getitem__, names), strict=True):
            np.testing.assert_array_equal(values, once[name])


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_plain_families_keep_their_names(name, tmp_path):
    weights = _transformers_weights(name)
    loaded = safetensors_weights(SafetensorsFolder(_save(tmp_path / "m", weights)), _spec(name))
    assert set(loaded) == set(weights)
    for key, values in loaded.items():
        np.testing.assert_array_equal(values, weights[key].numpy(), err_msg=key)


@pytest.mark.parametrize("name", ["gemma3_text", "gemma2"])
def test_gemma_norms_become_multipliers(name, tmp_path):
    weights = _transformers_weights(name)
    loaded = safetensors_weights(SafetensorsFolder(_save(tmp_path / "m", weights)), _spec(name))
    assert set(loaded) == set(weights)
    for key, values in loaded.items():
        expected = weights[key].numpy() + (1 if "norm" in key else 0)
        np.testing.assert_array_equal(values, expected.astype(np.float32), err_msg=key)


def test_phi3_fused_tensors_are_split(tmp_path):
    weights = _transformers_weights("phi3")
    loaded = safetensors_weights(SafetensorsFolder(_save(tmp_path / "m", weights)), _spec("phi3"))
    layer = "model.layers.1"
    qkv = weights[f"{layer}.self_attn.qkv_proj.weight"].numpy()
    for part, values in zip("qkv", np.split(qkv, [32, 48]), strict=True):
        np.testing.assert_array_equal(loaded[f"{layer}.self_attn.{part}_proj.weight"], values)
    gate, up = np.split(weights[f"{layer}.mlp.gate_up_proj.weight"].numpy(), 2)
    np.testing.assert_array_equal(loaded[f"{layer}.mlp.gate_proj.weight"], gate)
    np.testing.assert_array_equal(loaded[f"{layer}.mlp.up_proj.weight"], up)


def test_phi3_gguf(tmp_path):
    weights = {name: value.numpy() for name, value in _transformers_weights("phi3").items()}
    folder = _save(tmp_path / "m", {name: torch.from_numpy(value) for name, value in weights.items()})
    spec = _spec("phi3")
    writer = gguf.GGUFWriter(tmp_path / "phi.gguf", "phi3")
    renames = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
        "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for name, value in weights.items():
        for old, new in renames.items():
            name = name.replace(old, new)
        writer.add_tensor(name, value)
    writer.add_tensor("rope_factors_long.weight", np.arange(4, dtype=np.float32))
    finish(writer)
    from_gguf, from_folder = gguf_weights(GGUFFile(tmp_path / "phi.gguf"), spec), SafetensorsFolder(folder)
    expected = safetensors_weights(from_folder, spec)
    assert set(from_gguf) == {*expected, "rope_factors_long.weight"}
    for name, values in expected.items():
        np.testing.assert_array_equal(from_gguf[name], values, err_msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype, tmp_path):
    weights = _transformers_weights("llama")
    folder = SafetensorsFolder(_save(tmp_path / "m", weights, dtype=dtype))
    assert folder.precision == str(dtype).removeprefix("torch.")
    for name, values in safetensors_weights(folder, _spec("llama")).items():
        np.testing.assert_array_equal(values, weights[name].to(dtype).float().numpy())


def _shard(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
    for shard, members in shards.items():
        save_file({name: weights[name].contiguous() for name in members}, folder / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards(tmp_path):
    weights = _transformers_weights("llama")
    _shard(tmp_path / "m", weights)
    loaded = safetensors_weights(SafetensorsFolder(tmp_path / "m"), _spec("llama"))
    for name, values in loaded.items():
        np.testing.assert_array_equal(values, weights[name].numpy())
    (tmp_path / "m" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptFileError, match=r"lacks the shard model-00002-of-00002\.safetensors"):
        SafetensorsFolder(tmp_path / "m")


@pytest.mark.parametrize(
    "index",
    ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"x": "../../etc/passwd"}}', '{"weight_map": {"x": 1}}'],
)
def test_malformed_index(index, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CorruptFileError, match="is malformed"):
        SafetensorsFolder(tmp_path)


def test_safetensors_truncation_and_flips(tmp_path):
    folder = _save(tmp_path / "m", _transformers_weights("llama"))
    path, spec = folder / "model.safetensors", _spec("llama")
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    rng = np.random.default_rng(0)
    for length in [0, 1, 7, 8, 9, header, len(data) - 1, *rng.integers(0, len(data), 60)]:
        path.write_bytes(data[:length])
        with pytest.raises(CorruptFileError):
            SafetensorsFolder(folder)
    num_refused = 0
    for _ in range(200):
        damaged = bytearray(data)
        damaged[rng.integers(0, header)] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            safetensors_weights(SafetensorsFolder(folder), spec)
        except (CorruptFileError, UnsupportedModelError):
            num_refused += 1
    assert num_refused > 150


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    weights = _transformers_weights("llama")
    missing = {name: value for name, value in weights.items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(CorruptFileError, match=r"has no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        safetensors_weights(SafetensorsFolder(_save(tmp_path / "a", missing)), _spec("llama"))
    weights["model.norm.weight"] = torch.ones(31)
    with pytest.raises(CorruptFileError, match=r"tensor model\.norm\.weight .* shape \(31,\).* asks for \(32,\)"):
        safetensors_weights(SafetensorsFolder(_save(tmp_path / "b", weights)), _spec("llama"))


def test_tensors_without_a_place_are_refused_not_ignored(tmp_path):
    weights = _transformers_weights("llama", attention_bias=True)
    with pytest.raises(UnsupportedModelError, match=r"_proj\.bias .* has no place in llama"):
        safetensors_weights(SafetensorsFolder(_save(tmp_path / "a", weights)), _spec("llama"))
    assert len(safetensors_weights(SafetensorsFolder(tmp_path / "a"), _spec("llama", attention_bias=True)))


def test_stored_copy_of_a_tied_head_is_left_out(tmp_path):
    weights = _transformers_weights("llama", tie_word_embeddings=True)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    spec = _spec("llama", tie_word_embeddings=True)
    assert set(safetensors_weights(SafetensorsFolder(_save(tmp_path / "a", weights)), spec)) == set(
        expected_shapes(spec)
    )


def test_quantised_dtype_is_named(tmp_path):
    _save(tmp_path / "a", {"x": torch.zeros(4, 4)}, dtype=torch.float8_e4m3fn)
    with pytest.raises(UnsupportedModelError, match="dtype F8_E4M3; supported are F32, F16, BF16"):
        SafetensorsFolder(tmp_path / "a")


def test_folder_without_safetensors(tmp_path):
    with pytest.raises(UnsupportedModelError, match="convert the model to safetensors"):
        SafetensorsFolder(tmp_path)


def test_smollm2_layout(smollm2):
    """Rows 2i and 2i + 1 of a head in the file are rows i and i + 32 here."""
    head = GGUFFile(smollm2.path).read("blk.0.attn_q.weight").reshape(9, 64, 576)[4]
    ours = smollm2.weights["model.layers.0.self_attn.q_proj.weight"].reshape(9, 64, 576)[4]
    np.testing.assert_array_equal(ours[:32], head[0::2])
    np.testing.assert_array_equal(ours[32:], head[1::2])
    assert smollm2.precision == "4-bit GGUF (Q4_1, head Q8_0)"
    assert "lm_head.weight" not in smollm2.weights
