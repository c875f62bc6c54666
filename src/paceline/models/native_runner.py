"""NativeRunner: the CPU engine, compiled from native/. Logits of a row are the same bits however the work is cut."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from paceline.config import one_of, usable_cores
from paceline.errors import CacheError, ConfigError, CorruptFileError, PacelineError
from paceline.models.architecture import ModelSpec
from paceline.models.native_weights import PackedWeights
from paceline.models.rope import inverse_frequencies
from paceline.models.runner_base import RunnerBase
from paceline.sampling.sampler import sample_rows
from paceline.types import ForwardBatch, ForwardOutput, Logprobs, RowSampling

KVType = Literal["int16", "int8"]
_LANES = 16  # slots of a tile, elements of a vector
_MAX_THREADS = 1024
_MAX_BLOCKS = 2**31 - 1  # ids of blocks are int32


def kv_bytes_per_block(spec: ModelSpec, *, block_size: int, kv_cache_dtype: KVType) -> int:
    """Bytes that block_size tokens take in the K/V pool, all layers together; heads and blocks are padded to 16."""
    head_dim, slots = -(-spec.head_dim // _LANES) * _LANES, max(block_size, _LANES)
    head_bytes = (2 if kv_cache_dtype == "int16" else 1) * head_dim + 4  # of a key, or value, with its float32 scale
    return spec.num_layers * slots * 2 * spec.num_kv_heads * head_bytes


class NativeRunner(RunnerBase):
    """A model with its paged K/V pool; fulfils interfaces.Runner.

    A row of logits depends on its own tokens alone, bit for bit: not on batch companions, chunks, tree shapes, slots or
    threads. Between instruction sets, and between int16 and int8 K/V, it differs by rounding.
    max_model_len (None = the model's context) fixes RoPE's frequencies. isa: avx512, avx2vnni, avx2 or portable; None
    = what PACELINE_ISA says, or the best that the machine has. Raises ConfigError for a length, thread count or isa
    that cannot be had, CorruptFileError for weights that do not fit the spec, CacheError where memory does not hold
    the pool.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: PackedWeights,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_model_len: int | None = None,
        kv_cache_dtype: KVType = "int16",
        num_threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        from paceline import _native

        one_of("kv_cache_dtype", kv_cache_dtype, get_args(KVType))
        super().__init__(
            spec,
            num_blocks=num_blocks,
            block_size=block_size,
            bytes_per_block=kv_bytes_per_block(spec, block_size=block_size, kv_cache_dtype=kv_cache_dtype),
            max_model_len=max_model_len,
        )
        if num_threads is not None and not 1 <= num_threads <= _MAX_THREADS:
            raise ConfigError(f"num_threads must be from 1 to {_MAX_THREADS}; got {num_threads}: try {usable_cores()}.")
        self._weights = weights
        description = {
            **_sizes(spec),
            **_layers(spec, weights, self._context),
            "num_blocks": num_blocks,
            "block_size": block_size,
            "int8_kv": kv_cache_dtype == "int8",
        }
        isa = os.environ.get("PACELINE_ISA", "") if isa is None else isa
        num_threads = num_threads or usable_cores()
        try:
            if num_blocks > _MAX_BLOCKS:
                raise MemoryError
            self._model = _native.Model(description, num_threads=num_threads, isa=isa)
        except ValueError as error:
            if "no kernels named" in str(error):
                raise ConfigError(f"{error}: choose one of these in PACELINE_ISA.") from error
            raise CorruptFileError(f"the model's weights do not fit its description ({error}).") from error
        except MemoryError as error:
            raise CacheError(
                f"the K/V pool takes {num_blocks * self._kv.bytes_per_block:,} bytes, more than the system has free: "
                "lower kv_cache_memory, max_num_seqs or max_model_len."
            ) from error
        except RuntimeError as error:
            raise ConfigError(
                f"the system refuses to start {num_threads} threads ({error}): lower num_threads."
            ) from error
        self._all_layers = np.arange(spec.num_layers, dtype=np.int32)

    @property
    def weights(self) -> PackedWeights:
        """What the passes read, for a second runner of the same model."""
        return self._weights

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass over all layers reads."""
        return self._model.weight_bytes

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._model.isa

    def forward(self, batch: ForwardBatch, sampling: RowSampling | None = None) -> ForwardOutput:
        """One pass; hidden states are float32 arrays [T, d].

        Raises PacelineError where logits are not numbers, CacheError where memory does not hold what a pass needs.
        """
        try:
            return self._forward(batch, sampling)
        except MemoryError as error:
            raise CacheError(
                f"a pass of {len(batch.token_ids)} tokens takes more memory than the system has free: "
                "lower max_num_batched_tokens or kv_cache_memory."
            ) from error

    def _forward(self, batch: ForwardBatch, sampling: RowSampling | None) -> ForwardOutput:
        numbers = {self._number(layer): layer for layer in batch.hidden_layers}
        logits, sampled, hidden = self._model.forward(
            token_ids=batch.token_ids,
            positions=batch.positions,
            slots=batch.slots,
            query_starts=batch.query_starts,
            context_lengths=batch.context_lengths,
            block_tables=batch.block_tables,
            ancestors=batch.ancestors,
            logit_rows=batch.logit_rows,
            layers=self._all_layers if batch.layers is None else np.array(batch.layers, dtype=np.int32),
            hidden_layers=np.array(list(numbers), dtype=np.int32),
            sampling=sampling,
            want_logits=sampling is None or sampling.want_laws or sampling.want_logits,
        )
        if sampling is None:
            assert logits is not None
            _check_numbers(bool((logits < np.inf).all()))
            output = ForwardOutput(logits=logits)
        else:
            assert sampled is not None
            output = _output(sampled, sampling, logits if sampling.want_logits else None)
            if sampling.want_laws:  # tokens and log-probabilities stay the extension's, as in other passes
                assert logits is not None
                output = replace(
                    output, laws=sample_rows(logits, replace(sampling, num_logprobs=None, num_candidates=0)).laws
                )
        return replace(output, hidden={numbers[n]: x for n, x in hidden.items()}) if numbers else output

    def move(self, src_slots: np.ndarray, dst_slots: np.ndarray) -> None:
        """Copies K/V of all layers between slots [K]; all sources are read before any destination is written."""
        self._model.move(np.asarray(src_slots, dtype=np.int64), np.asarray(dst_slots, dtype=np.int64))

    def _number(self, layer: int | str) -> int:
        return self._spec.num_layers + 1 if layer == "final" else int(layer)


def _sizes(spec: ModelSpec) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    factors = ("norm_eps", "embedding_scale", "attention_scale")
    return {
        **{name: getattr(spec, name) for name in (*names, *factors)},
        "attention_softcap": spec.attention_softcap or 0.0,
        "final_softcap": spec.final_softcap or 0.0,
        "gelu": spec.activation == "gelu_tanh",
    }


def _layers(spec: ModelSpec, weights: PackedWeights, max_model_len: int) -> dict[str, Any]:
    """Weights under the names that the extension gives them."""
    ropes = [rope for rope in dict.fromkeys(spec.ropes) if rope is not None]
    inner = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "output": "self_attn.o_proj"}
    inner |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    norms = {"input_norm": "input_layernorm", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    if spec.sandwich_norms:
        norms |= {"attention_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
        norms |= {"output_norm": "post_feedforward_layernorm"}
    else:
        norms |= {"mlp_norm": "post_attention_layernorm"}
    layers = []
    for i, (rope, window) in enumerate(zip(spec.ropes, spec.windows, strict=True)):
        parts: dict[str, Any] = {"rope": -1 if rope is None else ropes.index(rope), "window": window or 0}
        for name, part in inner.items():
            stem = f"model.layers.{i}.{part}"
            parts[name] = weights.matrices[f"{stem}.weight"]
            if f"{stem}.bias" in weights.vectors:
                parts[f"{name}_bias"] = weights.vectors[f"{stem}.bias"]
        for name, part in norms.items():
            if (stem := f"model.layers.{i}.{part}.weight") in weights.vectors:
                parts[name] = weights.vectors[stem]
        layers.append(parts)
    embedding = weights.matrices["model.embed_tokens.weight"]
    return {
        "layers": layers,
        "ropes": [_frequencies(rope, weights.vectors, max_model_len) for rope in ropes],
        "embedding": embedding,
        "head": embedding if spec.tied_embeddings else weights.matrices["lm_head.weight"],
        "final_norm": weights.vectors["model.norm.weight"],
    }


def _frequencies(rope: Any, vectors: Mapping[str, np.ndarray], max_model_len: int) -> tuple[np.ndarray, float]:
    inverse, factor = inverse_frequencies(rope, max_model_len=max_model_len, weights=vectors)
    return np.ascontiguousarray(inverse, dtype=np.float32), float(factor)


def _output(sampled: Mapping[str, np.ndarray], sampling: RowSampling, logits: np.ndarray | None) -> ForwardOutput:
    _check_numbers(True not in sampled["has_nan"].tolist())
    if sampling.token_map is None and True in sampled["all_banned"].tolist():
        raise ConfigError(
            "every token is banned by allowed_token_ids, banned_token_ids, logit_bias or min_tokens; at least one"
            " must stay: allow more tokens."
        )
    logprobs = None
    if "rank" in sampled:
        logprobs = Logprobs(**{name: sampled[name] for name in ("token", "rank", "top_ids", "top")})
    return ForwardOutput(
        token_ids=sampled["token_ids"],
        logits=logits,
        logprobs=logprobs,
        successors=sampled.get("successors"),
        candidates=sampled.get("candidates"),
        candidate_scores=sampled.get("candidate_scores"),
    )


def _check_numbers(holds: bool) -> None:
    if not holds:
        raise PacelineError(
            "the model's logits are not numbers (NaN or infinite): its weights are damaged or overflow; check the file."
        )
