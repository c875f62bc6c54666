"""Writes a tiny Llama as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTE_LEVEL_SPACES = ("\u0120", "\u010a")  # space and line feed
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_tiny_llama(
    folder: Path, *, seed: int = 0, num_special: int = 3, template: str | None = TEMPLATE, context: int = 512
) -> Path:
    """A Hugging Face folder with a two-layer Llama of random weights over single ASCII characters, and a chat template.

    num_special changes the size of the vocabulary; template None makes a base model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    special = [*SPECIAL, *(f"<|extra_{i}|>" for i in range(num_special - len(SPECIAL)))]
    characters = [*map(chr, range(ord("!"), ord("~") + 1)), *BYTE_LEVEL_SPACES]
    vocab = {token: index for index, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocab),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": vocab["<|im_end|>"],
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, np.random.default_rng(seed)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(config: dict, rng: np.random.Generator) -> dict[str, np.ndarray]:
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns)).astype(np.float32) / np.sqrt(columns).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], width) * np.float32(2),
        "model.norm.weight": np.ones(width, np.float32),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(width, np.float32)
    return weights
