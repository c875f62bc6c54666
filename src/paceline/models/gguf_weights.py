"""A GGUF file's tensors under canonical names, in the layout of Hugging Face's checkpoints."""

from __future__ import annotations

import re

import numpy as np

from paceline.models.architecture import ModelSpec
from paceline.models.gguf_file import GGUFFile
from paceline.models.weights import LazyWeights, Source, expected_shapes, fused_rows

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_INNER_SANDWICH = _INNER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_FUSED = {"q_proj": "attn_qkv", "k_proj": "attn_qkv", "v_proj": "attn_qkv", "gate_proj": "ffn_up", "up_proj": "ffn_up"}
_INTERLEAVED_ROPE = ("llama", "mistral", "smollm3")  # their converters reorder q and k for ggml's pairwise rotation


def gguf_weights(file: GGUFFile, spec: ModelSpec) -> LazyWeights:
    """Raises CorruptFileError or UnsupportedModelError as LazyWeights does."""
    return LazyWeights(file, {name: _source(name, spec) for name in expected_shapes(spec)}, spec=spec)


def _source(name: str, spec: ModelSpec) -> Source:
    stem, kind = name.rsplit(".", 1)
    if stem in _OUTER:
        return Source(f"{_OUTER[stem]}.{kind}")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    assert match is not None, name
    layer, part = match.groups()
    leaf = part.rsplit(".", 1)[-1]
    if spec.architecture == "phi3" and leaf in _FUSED:
        return Source(f"blk.{layer}.{_FUSED[leaf]}.{kind}", rows=fused_rows(leaf, spec))
    tensor = f"blk.{layer}.{(_INNER_SANDWICH if spec.sandwich_norms else _INNER)[part]}.{kind}"
    if spec.architecture in _INTERLEAVED_ROPE and leaf in ("q_proj", "k_proj"):
        return Source(tensor, rows=_rotate_half_order(spec.num_heads if leaf == "q_proj" else spec.num_kv_heads, spec))
    return Source(tensor)


def _rotate_half_order(num_heads: int, spec: ModelSpec) -> np.ndarray:
    """Row (int32) of each output: from pairs (2i, 2i+1) to halves (i, i + head_dim/2) within each head's rows."""
    rows = np.arange(num_heads * spec.head_dim, dtype=np.int32)
    return np.ascontiguousarray(rows.reshape(num_heads, -1, 2).swapaxes(1, 2)).reshape(-1)
