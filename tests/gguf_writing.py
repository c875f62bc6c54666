"""Writes small GGUF files: a whole Llama with a byte-level tokenizer, and the converter's reordering of q and k."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of the Llama family."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def byte_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges of a little byte-level BPE."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["h e", "l l", "Ġ t", "Ġt he"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "Ġt", "Ġthe"]
    return tokens, [3] * 3 + [1] * (len(tokens) - 3), merges


def add_tokenizer(writer: gguf.GGUFWriter, *, pre: str = "smollm") -> int:
    """Adds the byte-level tokenizer; returns the size of its vocabulary."""
    tokens, types, merges = byte_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    return len(tokens)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tiny_gguf(path: Path, *, seed: int = 0, pre: str = "smollm") -> dict[str, np.ndarray]:
    """A one-layer Llama (2 heads, 1 key head, width 32); returns its weights by canonical name."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    vocab_size = add_tokenizer(writer, pre=pre)
    rng = np.random.default_rng(seed)
    shapes = {
        "model.embed_tokens": ("token_embd", (vocab_size, 32)),
        "model.layers.0.input_layernorm": ("blk.0.attn_norm", (32,)),
        "model.layers.0.self_attn.q_proj": ("blk.0.attn_q", (32, 32)),
        "model.layers.0.self_attn.k_proj": ("blk.0.attn_k", (16, 32)),
        "model.layers.0.self_attn.v_proj": ("blk.0.attn_v", (16, 32)),
        "model.layers.0.self_attn.o_proj": ("blk.0.attn_output", (32, 32)),
        "model.layers.0.post_attention_layernorm": ("blk.0.ffn_norm", (32,)),
        "model.layers.0.mlp.gate_proj": ("blk.0.ffn_gate", (64, 32)),
        "model.layers.0.mlp.up_proj": ("blk.0.ffn_up", (64, 32)),
        "model.layers.0.mlp.down_proj": ("blk.0.ffn_down", (32, 64)),
        "model.norm": ("output_norm", (32,)),
    }
    weights = {}
    for name, (tensor, shape) in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        weights[f"{name}.weight"] = values
        heads = {"blk.0.attn_q": 2, "blk.0.attn_k": 1}.get(tensor)
        writer.add_tensor(f"{tensor}.weight", values if heads is None else permute(values, heads))
    finish(writer)
    return weights
