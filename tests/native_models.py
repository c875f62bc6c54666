"""Tiny random models on the native engine, and the plain rows that whatever else it computes must equal to the bit.

No torch here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from batches import VOCAB_SIZE, make_batch
from paceline import _native
from paceline.errors import ConfigError
from paceline.models.architecture import ModelSpec
from paceline.models.native_runner import NativeRunner
from paceline.models.native_weights import PackedWeights
from paceline.models.rope import RopeSpec
from paceline.models.weights import expected_shapes

CONTEXT = 192
ROPE = RopeSpec(theta=10_000.0, dim=16)
PLAIN = ModelSpec(
    architecture="qwen2",
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=CONTEXT,
    norm_eps=1e-6,
    ropes=(ROPE,) * 3,
    windows=(None,) * 3,
    qkv_bias=True,
    attention_scale=0.25,
)
EVERYTHING = ModelSpec(  # windows, caps, norms of q and k, sandwich norms, a layer without rope, partial rope
    architecture="gemma3",
    vocab_size=VOCAB_SIZE,
    hidden_size=96,
    intermediate_size=160,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=24,
    context_length=CONTEXT,
    norm_eps=1e-6,
    activation="gelu_tanh",
    ropes=(ROPE, None, RopeSpec(theta=1_000_000.0, dim=24), ROPE),
    windows=(7, None, 20, None),
    output_bias=True,
    mlp_bias=True,
    qk_norm=True,
    sandwich_norms=True,
    tied_embeddings=True,
    embedding_scale=96**0.5,
    attention_scale=24**-0.5,
    attention_softcap=5.0,
    final_softcap=8.0,
)
WIDE = replace(
    PLAIN, hidden_size=256, intermediate_size=512, num_layers=2, head_dim=64,
    ropes=(RopeSpec(theta=10_000.0, dim=64),) * 2, windows=(None, 9), attention_scale=0.125,
)  # fmt: skip
CASES: Mapping[str, tuple[ModelSpec, str]] = {  # the formats want widths of whole blocks
    "f32": (PLAIN, "f32"),
    "f32-everything": (EVERYTHING, "f32"),
    "bf16": (PLAIN, "bf16"),
    "f16": (PLAIN, "F16"),
    "int8": (EVERYTHING, "i8"),
    "int4": (PLAIN, "q4_1"),
    "q8_0": (EVERYTHING, "Q8_0"),
    "q4_0": (EVERYTHING, "Q4_0"),
    "q4_1": (PLAIN, "Q4_1"),
    "q5_1": (PLAIN, "Q5_1"),
    "q3_k": (WIDE, "Q3_K"),
    "q4_k": (WIDE, "Q4_K"),
    "q5_k": (WIDE, "Q5_K"),
    "q6_k": (WIDE, "Q6_K"),
}
_BLOCKS: Mapping[str, tuple[int, int, Mapping[int, float]]] = {  # inputs, bytes, and f16 scales: offset -> magnitude
    "Q4_0": (32, 18, {0: 1 / 8}),
    "Q4_1": (32, 20, {0: 1 / 8, 2: -1.0}),
    "Q5_1": (32, 24, {0: 1 / 16, 2: -1.0}),
    "Q8_0": (32, 34, {0: 1 / 100}),
    "Q3_K": (256, 110, {108: 1 / 64}),
    "Q4_K": (256, 144, {0: 1 / 256, 2: 1 / 32}),
    "Q5_K": (256, 176, {0: 1 / 512, 2: 1 / 32}),
    "Q6_K": (256, 210, {208: 1 / 2048}),
}


def random_matrix(format_name: str, outputs: int, inputs: int, rng: np.random.Generator) -> _native.PackedMatrix:
    """Weights of about unit gain: blocks of a GGUF type (upper case), or floats rounded to a packed format."""
    gain = inputs**-0.5
    if format_name not in _BLOCKS and format_name != "F16":
        return _native.pack_floats((rng.standard_normal((outputs, inputs)) * gain).astype(np.float32), format_name)
    if format_name == "F16":
        halves = (rng.standard_normal((outputs, inputs)) * gain).astype(np.float16)
        return _native.pack_ggml("F16", halves.view(np.uint8).reshape(-1), outputs, inputs)
    block_inputs, block_bytes, scales = _BLOCKS[format_name]
    blocks = rng.integers(0, 256, (outputs * inputs // block_inputs, block_bytes), dtype=np.uint8)
    for offset, magnitude in scales.items():
        values = (magnitude * gain * rng.uniform(0.5, 1.5, (len(blocks), 1))).astype(np.float16)
        blocks[:, offset : offset + 2] = values.view(np.uint8)
    return _native.pack_ggml(format_name, blocks.reshape(-1), outputs, inputs)


def random_weights(spec: ModelSpec, format_name: str, *, seed: int = 0) -> PackedWeights:
    """Every matrix in the format; norms, biases as float32."""
    rng = np.random.default_rng(seed)
    matrices: dict[str, _native.PackedMatrix] = {}
    vectors: dict[str, np.ndarray] = {}
    for name, shape in expected_shapes(spec).items():
        if len(shape) == 2:
            matrices[name] = random_matrix(format_name, *shape, rng)
        else:
            centre = 0.0 if name.endswith("bias") else 1.0
            vectors[name] = (centre + 0.3 * rng.standard_normal(shape)).astype(np.float32)
    return PackedWeights(matrices=matrices, vectors=vectors)


def packed_floats(weights: Mapping[str, np.ndarray]) -> PackedWeights:
    """A model's float32 arrays as they are."""
    return PackedWeights(
        matrices={name: _native.pack_floats(array, "f32") for name, array in weights.items() if array.ndim == 2},
        vectors={name: array for name, array in weights.items() if array.ndim == 1},
    )


@cache
def case_weights(case: str) -> PackedWeights:
    return random_weights(*CASES[case])


def case_runner(case: str, *, block_size: int = 16, num_blocks: int | None = None, **options: Any) -> NativeRunner:
    """A runner with room for four whole contexts."""
    return NativeRunner(
        CASES[case][0],
        case_weights(case),
        num_blocks=num_blocks or 4 * CONTEXT // block_size,
        block_size=block_size,
        max_model_len=CONTEXT,
        **{"num_threads": 1, **options},
    )


@cache
def instruction_sets() -> tuple[str, ...]:
    """Those that this machine runs."""
    available = []
    for isa in ("avx512", "avx2vnni", "avx2", "portable"):
        with contextlib.suppress(ConfigError):
            available.append(case_runner("f32", isa=isa).isa)
    return tuple(available)


@dataclass
class PlainRows:
    """Logits of plain decoding: token by token, nothing beside it. Keeps the K/V of the last sequence asked for."""

    runner: NativeRunner

    def __post_init__(self) -> None:
        self._tokens: list[int] = []
        self._rows: list[np.ndarray] = []
        self._table = np.arange(self.runner.kv.num_blocks)

    def __call__(self, tokens: Sequence[int]) -> np.ndarray:
        """[T, V] for a sequence of T tokens."""
        tokens = [int(token) for token in tokens]
        same = 0
        while same < min(len(tokens), len(self._tokens)) and tokens[same] == self._tokens[same]:
            same += 1
        del self._tokens[same:], self._rows[same:]
        for context in range(same, len(tokens)):
            request = {"tokens": tokens[context : context + 1], "context": context, "table": self._table}
            logits = self.runner.forward(make_batch([request], block_size=self.runner.kv.block_size)).logits
            assert logits is not None
            self._rows.append(logits[0])
        self._tokens = tokens
        return np.stack(self._rows)


@cache
def plain_rows(case: str, kv_cache_dtype: str, isa: str | None = None) -> PlainRows:
    return PlainRows(case_runner(case, kv_cache_dtype=kv_cache_dtype, isa=isa))


def assert_same_bits(ours: np.ndarray, plain: np.ndarray) -> None:
    __tracebackhide__ = True
    assert ours.dtype == plain.dtype == np.float32
    assert ours.shape == plain.shape
    differing = np.flatnonzero((ours.view(np.uint32) != plain.view(np.uint32)).any(axis=1))
    assert len(differing) == 0, (
        f"rows {differing.tolist()} of {len(ours)} differ, by up to {np.abs(ours - plain).max():.3g}"
    )
