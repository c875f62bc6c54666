"""Tiny random transformers models beside the runner made of their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import transformers

from batches import BLOCK_SIZE, VOCAB_SIZE
from paceline.models.architecture import ModelSpec
from paceline.models.torch_runner import TorchRunner

BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 10_000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}


def longrope(dim: int) -> dict:
    """Rope parameters of Phi-3's kind for a head of `dim`."""
    return {
        "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.1 * i for i in range(dim // 2)],
        "long_factor": [2.0 + 0.5 * i for i in range(dim // 2)],
    }  # fmt: skip


FAMILIES = {  # transformers class and what is changed in BASE
    "llama": ("Llama", {}),
    "llama-head-dim-bias": ("Llama", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "llama-tied-mha": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "Llama",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False, "beta_fast": 8.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}),
    "gemma3-final-cap": ("Gemma3", {"head_dim": 16, "sliding_window_pattern": 2, "final_logit_softcapping": 5.0}),
    "gemma3-linear": (
        "Gemma3",
        {
            "head_dim": 16, "sliding_window": 6, "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3-window": ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 5}),
    "phi3": ("Phi3", {}),
    "phi3-window": ("Phi3", {"sliding_window": 7}),
    "phi3-partial": ("Phi3", {"rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}),
    # A maximum length within the original context takes the short factors, as transformers does for short passes
    "phi3-longrope-short": (
        "Phi3",
        {"original_max_position_embeddings": 64, "rope_parameters": {**longrope(8), "partial_rotary_factor": 1.0}},
    ),
}  # fmt: skip


class Peer:
    """A tiny transformers model and the runner made of its weights."""

    def __init__(self, family: str, options: dict, *, num_blocks: int = 64, max_model_len: int | None = None) -> None:
        prefix = "Gemma3Text" if family == "Gemma3" else family
        config = getattr(transformers, f"{prefix}Config")(**{**BASE, **options})
        config._attn_implementation = "eager"
        torch.manual_seed(7)
        self.model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "norm" in name or "bias" in name:  # ones and zeros would hide a mistake
                    parameter.add_(0.3 * torch.randn_like(parameter))
        self.spec = ModelSpec.from_hf_config(config.to_dict())
        self.weights = canonical_weights(self.model.state_dict(), family, self.spec)
        self.runner = TorchRunner(
            self.spec,
            self.weights,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len or min(64, self.spec.context_length),
            num_threads=1,
        )

    @torch.no_grad()
    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """transformers' logits [T, V]."""
        return self.model(torch.from_numpy(tokens)[None].long()).logits[0].numpy()


def canonical_weights(state: dict[str, torch.Tensor], family: str, spec: ModelSpec) -> dict[str, np.ndarray]:
    """transformers' state under canonical names: norms as multipliers, fused matrices of Phi-3 apart."""
    weights = {}
    for name, tensor in state.items():
        array = tensor.float().numpy().copy()
        if family.startswith("Gemma") and "norm" in name:
            array += 1
        if "qkv_proj" in name:
            kv = spec.num_kv_heads * spec.head_dim
            parts = np.split(array, [spec.num_heads * spec.head_dim, spec.num_heads * spec.head_dim + kv])
            weights |= {name.replace("qkv_proj", f"{x}_proj"): p for x, p in zip("qkv", parts, strict=True)}
        elif "gate_up_proj" in name:
            gate, up = np.split(array, 2)
            weights[name.replace("gate_up", "gate")], weights[name.replace("gate_up", "up")] = gate, up
        elif not (name == "lm_head.weight" and spec.tied_embeddings):
            weights[name] = array
    return weights


def model_of_layers(peer: Peer, layers: Sequence[int]) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """The peer's model with only some of its layers."""
    spec = dataclasses.replace(
        peer.spec,
        num_layers=len(layers),
        ropes=tuple(peer.spec.ropes[i] for i in layers),
        windows=tuple(peer.spec.windows[i] for i in layers),
    )
    weights = {name: array for name, array in peer.weights.items() if not name.startswith("model.layers.")}
    for new, old in enumerate(layers):
        start = f"model.layers.{old}."
        weights |= {
            f"model.layers.{new}.{name.removeprefix(start)}": array
            for name, array in peer.weights.items()
            if name.startswith(start)
        }
    return spec, weights
