"""The tensors of a model under canonical names (those of Hugging Face's Llama family), read when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from paceline.errors import CorruptFileError, UnsupportedModelError
from paceline.models.architecture import ModelSpec

# Rope factors that some files carry as tensors; a runner looks them up under these names.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class TensorFile(Protocol):
    """What reads tensors by the names that a file gives them."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]  # by the file's own names

    def read(self, name: str, *, rows: np.ndarray | None = None) -> np.ndarray:
        """float32; rows: which entries of the first axis, in this order, None = all."""
        ...

    def stored(self, name: str) -> tuple[str, np.ndarray]:
        """GGUF's name for the tensor's type, and its bytes as they lie in the file, uint8 [bytes]."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """How a canonical tensor comes out of a file."""

    tensor: str  # name in the file
    rows: np.ndarray | None = None  # int32: a part of a fused tensor, or another order; None = as they are
    added: float = 0.0  # to each value


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix as its file has it: what can be packed without a detour over floats."""

    type_name: str  # one of gguf_file.TENSOR_TYPES
    data: np.ndarray  # uint8, row after row
    shape: tuple[int, int]  # of the canonical matrix
    rows: np.ndarray | None  # int32: which of the stored rows it has, in its order; None = all


class LazyWeights(Mapping[str, np.ndarray]):
    """Read-only float32 arrays by canonical name; each access reads (and dequantises) anew, so keep what you need.

    Thread-safe. Raises CorruptFileError at construction for a tensor that is missing or has not the spec's shape,
    UnsupportedModelError for one that the family has no use for.
    """

    def __init__(self, file: TensorFile, sources: Mapping[str, Source], *, spec: ModelSpec) -> None:
        self._file = file
        self._sources = {**sources, **{name: Source(name) for name in ROPE_TENSORS if name in file.shapes}}
        self._shapes = expected_shapes(spec)
        assert sources.keys() == self._shapes.keys()
        fused: dict[str, tuple[int, ...]] = {}  # shape of each of the file's tensors: its parts' rows together
        for name, source in sources.items():
            rows, *rest = self._shapes[name]
            fused[source.tensor] = (fused.get(source.tensor, (0,))[0] + rows, *rest)
        for tensor, shape in fused.items():
            if tensor not in file.shapes:
                raise CorruptFileError(f"{file.path} has no tensor {tensor}: download the model again.")
            if file.shapes[tensor] != shape:
                raise CorruptFileError(
                    f"tensor {tensor} in {file.path} has the shape {file.shapes[tensor]}; the model's description "
                    f"asks for {shape}: download the model again."
                )
        for name in file.shapes.keys() - {source.tensor for source in self._sources.values()}:
            if not _is_redundant(name, spec):
                raise UnsupportedModelError(
                    f"tensor {name} in {file.path} has no place in {spec.architecture}: Paceline would ignore it."
                )

    def __getitem__(self, name: str) -> np.ndarray:
        source = self._sources[name]
        values = self._file.read(source.tensor, rows=source.rows)
        if source.added:
            values = values + np.float32(source.added)
        values.setflags(write=False)
        return values

    @property
    def matrix_names(self) -> tuple[str, ...]:
        """Names of the tensors that have two axes."""
        return tuple(name for name, shape in self._shapes.items() if len(shape) == 2)

    def stored(self, name: str) -> StoredMatrix:
        """A matrix without dequantising it; its data are a view of the file."""
        source, (outputs, inputs) = self._sources[name], self._shapes[name]
        assert not source.added, "matrices are used as they are"
        type_name, data = self._file.stored(source.tensor)
        return StoredMatrix(type_name, data, (outputs, inputs), source.rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the tensor
        return name in self._sources


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every canonical tensor of a model."""
    hidden, q_width, kv_width = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if spec.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    projections = (
        ("self_attn.q_proj", q_width, hidden, spec.qkv_bias),
        ("self_attn.k_proj", kv_width, hidden, spec.qkv_bias),
        ("self_attn.v_proj", kv_width, hidden, spec.qkv_bias),
        ("self_attn.o_proj", hidden, q_width, spec.output_bias),
        ("mlp.gate_proj", spec.intermediate_size, hidden, spec.mlp_bias),
        ("mlp.up_proj", spec.intermediate_size, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, spec.intermediate_size, spec.mlp_bias),
    )
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{norm}.weight": (hidden,) for norm in norms}
        if spec.qk_norm:
            shapes |= {f"{layer}.self_attn.{norm}.weight": (spec.head_dim,) for norm in ("q_norm", "k_norm")}
        for name, rows, columns, has_bias in projections:
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def fused_rows(name: str, spec: ModelSpec) -> np.ndarray:
    """Rows (int32) of a canonical projection in Phi-3's fused qkv (q, k, v) or gate-up tensor."""
    q_width, kv_width, inner = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.intermediate_size
    starts = {
        "q_proj": (0, q_width),
        "k_proj": (q_width, kv_width),
        "v_proj": (q_width + kv_width, kv_width),
        "gate_proj": (0, inner),
        "up_proj": (inner, inner),
    }
    start, length = starts[name]
    return np.arange(start, start + length, dtype=np.int32)


def _is_redundant(name: str, spec: ModelSpec) -> bool:
    """Tensors that may be left out without a change: rope's own table, a stored copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (spec.tied_embeddings and name == "lm_head.weight")
