"""Reads safetensors checkpoints, in one file or in shards, memory-mapped.

Format: https://github.com/huggingface/safetensors. The safetensors package gives NumPy no bfloat16; the header is
JSON and small enough to read here.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import CorruptFileError, UnsupportedModelError
from paceline.models.architecture import ModelSpec
from paceline.models.weights import LazyWeights, Source, expected_shapes, fused_rows

INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_DTYPES = {"F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class _Tensor:
    data: mmap.mmap
    dtype: str  # a key of _DTYPES
    shape: tuple[int, ...]
    offset: int  # bytes from the start of its file


class SafetensorsFolder:
    """The safetensors files of a model folder. Reading is thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises CorruptFileError for a missing shard, a malformed or a truncated file, UnsupportedModelError for
        a dtype that is not implemented or a folder without safetensors."""
        self.path = path
        self.tensors: dict[str, _Tensor] = {}
        for shard, names in _shards(path).items():
            found = _read_header(path / shard)
            for name in names or found:
                if name not in found:
                    raise CorruptFileError(f"{path / shard} lacks the tensor {name}: download the model again.")
                self.tensors[name] = found[name]
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def precision(self) -> str:
        """The dtype that most weights have, such as "bfloat16"."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + math.prod(tensor.shape)
        return _DTYPES[max(counts, key=lambda dtype: counts[dtype])][0]

    def read(self, name: str, *, rows: np.ndarray | None = None) -> np.ndarray:
        """The tensor, or these entries of its first axis, as float32."""
        tensor = self.tensors[name]
        storage = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[tensor.dtype]
        raw = np.frombuffer(tensor.data, storage, math.prod(tensor.shape), tensor.offset)
        raw = raw.reshape(tensor.shape)
        raw = raw if rows is None else raw[rows]
        if tensor.dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(raw, np.float32)

    def stored(self, name: str) -> tuple[str, np.ndarray]:
        """The tensor's dtype (GGUF has the same names) and bytes, uint8."""
        tensor = self.tensors[name]
        num_bytes = math.prod(tensor.shape) * _DTYPES[tensor.dtype][1]
        return tensor.dtype, np.frombuffer(tensor.data, np.uint8, num_bytes, tensor.offset)


def safetensors_weights(folder: SafetensorsFolder, spec: ModelSpec) -> LazyWeights:
    """Raises CorruptFileError or UnsupportedModelError as LazyWeights does."""
    return LazyWeights(folder, {name: _source(name, spec) for name in expected_shapes(spec)}, spec=spec)


def _source(name: str, spec: ModelSpec) -> Source:
    leaf = name.split(".")[-2]
    if spec.architecture == "phi3" and leaf in ("q_proj", "k_proj", "v_proj"):
        return Source(name.replace(leaf, "qkv_proj"), rows=fused_rows(leaf, spec))
    if spec.architecture == "phi3" and leaf in ("gate_proj", "up_proj"):
        return Source(name.replace(leaf, "gate_up_proj"), rows=fused_rows(leaf, spec))
    if spec.architecture.startswith("gemma") and "norm" in leaf:
        return Source(name, added=1.0)  # Gemma stores the norm's multiplier minus one
    return Source(name)


def _shards(folder: Path) -> dict[str, list[str] | None]:
    """File name -> names of its tensors (None = all that are in it)."""
    index = folder / INDEX_NAME
    if (folder / _SINGLE_NAME).is_file() and not index.is_file():
        return {_SINGLE_NAME: None}
    if not index.is_file():
        raise UnsupportedModelError(
            f"{folder} has neither {_SINGLE_NAME} nor {INDEX_NAME}: convert the model to safetensors."
        )
    shards: dict[str, list[str] | None] = {}
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise ValueError(f"{shard!r} is not a file name")
            names = shards.setdefault(shard, [])
            assert names is not None
            names.append(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{index} is malformed ({error}): download the model again.") from error
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise CorruptFileError(f"{folder} lacks the shard {missing[0]}: download the model again.")
    return shards


def _read_header(path: Path) -> dict[str, _Tensor]:
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > min(len(data) - 8, _MAX_HEADER_BYTES):
            raise ValueError("it ends in the middle of its header")
        header = json.loads(data[8 : 8 + length])
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        header.pop("__metadata__", None)
        return {name: _tensor(name, entry, data, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptFileError(
            f"{path} is not a readable safetensors file ({error}): download the model again."
        ) from error


def _tensor(name: str, entry: dict[str, Any], data: mmap.mmap, start: int) -> _Tensor:
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in _DTYPES:
        raise UnsupportedModelError(
            f"tensor {name} has dtype {dtype}; supported are {', '.join(_DTYPES)}: use an unquantised checkpoint."
        )
    if not shape or any(not isinstance(size, int) or size <= 0 for size in (*shape, begin + 1, end)):
        raise ValueError(f"tensor {name} cannot have the shape {shape}")
    if end - begin != math.prod(shape) * _DTYPES[dtype][1]:
        raise ValueError(f"tensor {name} of shape {shape} has {end - begin} bytes")
    if start + end > len(data):
        raise ValueError(f"tensor {name} lies beyond the end of the file; it was cut short")
    return _Tensor(data, dtype, shape, start + begin)
