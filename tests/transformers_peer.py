"""Tiny random transformers models beside the runner made of their weights, and batches for both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
import transformers

from paceline.interfaces import Runner
from paceline.models.architecture import ModelSpec
from paceline.models.torch_runner import TorchRunner
from paceline.types import ForwardBatch

BLOCK_SIZE = 4
BASE = {
    "vocab_size": 97,
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


def make_batch(
    requests: list[dict],
    *,
    logit_rows: np.ndarray | None = None,
    hidden_layers: tuple = (),
    layers: tuple[int, ...] | None = None,
    block_size: int = BLOCK_SIZE,
) -> ForwardBatch:
    """Packs requests: each has tokens, context, table, and optionally ancestors and depths."""
    tokens, positions, slots, starts = [], [], [], [0]
    for r in requests:
        n = len(r["tokens"])
        keys = r["context"] + np.arange(n)
        table = np.asarray(r["table"])
        tokens.append(np.asarray(r["tokens"], dtype=np.int32))
        positions.append(r["context"] + np.asarray(r.get("depths", np.arange(n)), dtype=np.int32))
        slots.append(table[keys // block_size].astype(np.int64) * block_size + keys % block_size)
        starts.append(starts[-1] + n)
    return ForwardBatch(
        token_ids=np.concatenate(tokens),
        positions=np.concatenate(positions).astype(np.int32),
        slots=np.concatenate(slots),
        query_starts=np.array(starts, dtype=np.int32),
        context_lengths=np.array([r["context"] for r in requests], dtype=np.int32),
        block_tables=[np.asarray(r["table"], dtype=np.int32) for r in requests],
        ancestors=[r.get("ancestors") for r in requests],
        logit_rows=np.arange(starts[-1], dtype=np.int32) if logit_rows is None else logit_rows,
        hidden_layers=hidden_layers,
        layers=layers,
    )


def run_in_chunks(runner: Runner, tokens: np.ndarray, table: list[int], sizes: list[int]) -> np.ndarray:
    """Logits of all tokens, computed in passes of the given sizes."""
    logits, done = [], 0
    for size in sizes:
        batch = make_batch([{"tokens": tokens[done : done + size], "context": done, "table": table}])
        logits.append(runner.forward(batch).logits)
        done += size
    assert done == len(tokens)
    return np.concatenate(logits)


def random_tokens(length: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, BASE["vocab_size"], length).astype(np.int32)
