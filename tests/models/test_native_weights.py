"""Packed weights are the loader's float32 ones; dtype and quantization; damaged files."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

pytest.importorskip("paceline._native", reason="the extension was not built")

from gguf_writing import add_tokenizer, finish, permute, write_tiny_gguf
from paceline.errors import ConfigError, CorruptFileError, PacelineError
from paceline.models.architecture import ModelSpec
from paceline.models.loader import LoadedModel, load
from paceline.models.native_weights import PackedWeights, pack_model
from paceline.models.safetensors_file import SafetensorsFolder, safetensors_weights
from paceline.models.weights import expected_shapes

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
CONFIG = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> LoadedModel:
    """A float32 GGUF whose q and k rows are in ggml's order."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_gguf(path)
    return load(str(path))


def write_quantised_gguf(path: Path, kind: str) -> None:
    """A one-layer Llama of width 256 with all its matrices in one type."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(64)
    vocab_size = add_tokenizer(writer)
    rng = np.random.default_rng(0)
    quantised = gguf.GGMLQuantizationType[kind]
    block_bytes = gguf.GGML_QUANT_SIZES[quantised][1]
    rows = {
        "token_embd": vocab_size, "blk.0.attn_q": 256, "blk.0.attn_k": 128, "blk.0.attn_v": 128,
        "blk.0.attn_output": 256, "blk.0.ffn_gate": 256, "blk.0.ffn_up": 256, "blk.0.ffn_down": 256,
    }  # fmt: skip
    for name, count in rows.items():
        if kind == "Q6_K":
            blocks = rng.integers(0, 256, (count, block_bytes), np.uint8)
            blocks[:, 208:] = rng.standard_normal((count, 1)).astype(np.float16).view(np.uint8)
        else:
            blocks = gguf.quantize(rng.standard_normal((count, 256)).astype(np.float32), quantised)
        heads = {"blk.0.attn_q": 4, "blk.0.attn_k": 2}.get(name)
        blocks = blocks if heads is None else permute(blocks, heads)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=quantised)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(256, np.float32))
    finish(writer)


def folder_model(tmp_path: Path, name: str, dtype: torch.dtype, **changes) -> LoadedModel:
    """Random weights of a family in a safetensors folder; tokenizer and precision are of no account here."""
    spec = ModelSpec.from_hf_config({**CONFIG, "model_type": name, **changes})
    torch.manual_seed(0)
    weights = {key: torch.randn(shape, dtype=dtype) for key, shape in expected_shapes(spec).items()}
    if name == "phi3":
        for i in range(spec.num_layers):
            for parts, fused in (("q k v", "self_attn.qkv"), ("gate up", "mlp.gate_up")):
                names = [f"model.layers.{i}.{fused.split('.')[0]}.{part}_proj.weight" for part in parts.split()]
                weights[f"model.layers.{i}.{fused}_proj.weight"] = torch.cat([weights.pop(key) for key in names])
    save_file(weights, tmp_path / "model.safetensors")
    loaded = safetensors_weights(SafetensorsFolder(tmp_path), spec)
    return LoadedModel(name, tmp_path, spec, None, loaded, f"{dtype} safetensors")  # type: ignore[arg-type]


def assert_equal(packed: PackedWeights, model: LoadedModel) -> None:
    assert {*packed.matrices, *packed.vectors} == set(model.weights)
    for name, matrix in packed.matrices.items():
        np.testing.assert_array_equal(matrix.unpack(), model.weights[name], err_msg=name)
    for name, values in packed.vectors.items():
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, model.weights[name], err_msg=name)


def formats(packed: PackedWeights) -> dict[str, str]:
    return {name: matrix.format for name, matrix in packed.matrices.items()}


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q4_0", "Q5_1", "Q8_0", "Q6_K"])
def test_gguf_weights_keep_their_values_and_rows(kind, tmp_path):
    write_quantised_gguf(tmp_path / "model.gguf", kind)
    model = load(str(tmp_path / "model.gguf"))
    packed = pack_model(model)
    assert_equal(packed, model)
    expected = {"F32": "f32", "BF16": "bf16", "Q4_0": "q4_1", "Q5_1": "q5_1", "Q8_0": "q8_0", "Q6_K": "q6_k"}[kind]
    assert set(formats(packed).values()) == {expected}
    assert "lm_head.weight" not in packed.matrices, "the head is the embedding"
    floats = pack_model(model, dtype="float32")
    assert set(formats(floats).values()) == {"f32"}
    assert_equal(floats, model)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "phi3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_folders_keep_their_values(name, dtype, tmp_path):
    model = folder_model(tmp_path, name, dtype)
    packed = pack_model(model)
    assert_equal(packed, model)
    expected = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    assert set(formats(packed).values()) == {expected}


def test_arrays_in_a_dict_are_packed_as_float32(tiny):
    model = replace(tiny, weights=dict(tiny.weights))
    packed = pack_model(model)
    assert set(formats(packed).values()) == {"f32"}
    assert_equal(packed, model)


def test_bfloat16_rounds_what_is_more_precise(tiny):
    packed = pack_model(tiny, dtype="bfloat16")
    assert set(formats(packed).values()) == {"bf16"}
    for name, matrix in packed.matrices.items():
        rounded = torch.from_numpy(tiny.weights[name].copy()).bfloat16().float().numpy()
        np.testing.assert_array_equal(matrix.unpack(), rounded)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_leaves_the_vocabulary_in_int8(quantization, tmp_path):
    model = folder_model(tmp_path, "llama", torch.bfloat16, tie_word_embeddings=False)
    packed = pack_model(model, quantization=quantization)
    for name, matrix in packed.matrices.items():
        assert matrix.format == ("i8" if quantization == "int8" or name in VOCABULARY else "q4_1"), name
        error = np.abs(matrix.unpack() - model.weights[name]).max()
        assert error < (0.02 if matrix.format == "i8" else 0.4), name
    assert {*VOCABULARY} <= set(packed.matrices)


def test_quantization_is_refused_where_it_would_quantise_quants_or_ignore_a_dtype(tiny, tmp_path):
    write_quantised_gguf(tmp_path / "model.gguf", "Q8_0")
    with pytest.raises(ConfigError, match=r"int4 is for unquantised checkpoints; .* is 8-bit GGUF .*: drop it\.$"):
        pack_model(load(str(tmp_path / "model.gguf")), quantization="int4")
    with pytest.raises(ConfigError, match="dtype bfloat16 cannot: drop one"):
        pack_model(tiny, quantization="int8", dtype="bfloat16")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_nan_names_its_tensor(name, quantization, tiny):
    weights = {key: values.copy() for key, values in tiny.weights.items()}
    weights[name].flat[3] = np.nan
    with pytest.raises(CorruptFileError, match=rf"{name} in .*tiny\.gguf has values that are NaN"):
        pack_model(replace(tiny, weights=weights), quantization=quantization)


@pytest.fixture(scope="module")
def valid_gguf(tmp_path_factory) -> tuple[bytes, int, Path]:
    """A whole file, the length of its header, and where damaged ones go."""
    path = tmp_path_factory.mktemp("fuzz") / "model.gguf"
    write_quantised_gguf(path, "Q8_0")
    return path.read_bytes(), min(tensor.data_offset for tensor in gguf.GGUFReader(path).tensors), path


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_files_are_refused_or_read_never_worse(valid_gguf, data):
    content, header, path = valid_gguf
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(0, 4), label="flips")):
        damaged[data.draw(st.integers(0, header - 1), label="where")] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    if data.draw(st.booleans(), label="truncate"):
        del damaged[data.draw(st.integers(0, len(damaged)), label="length") :]
    path.write_bytes(damaged)
    with contextlib.suppress(PacelineError):
        assert pack_model(load(str(path))).matrices
