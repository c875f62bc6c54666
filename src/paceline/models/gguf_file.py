"""Reads GGUF files: metadata and tensors, memory-mapped.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here because gguf.GGUFReader
keeps an array object for every vocabulary entry (seconds for a model that loads in a fraction of one) and trusts
what it reads; block sizes and dequantisation are the gguf package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import CorruptFileError, UnsupportedModelError

TENSOR_TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_ELEMENTS = 1 << 48


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies in the file. `shape` is NumPy's order: rows first."""

    name: str
    type_name: str  # one of TENSOR_TYPES
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """An open GGUF file. Reading is thread-safe; nothing is dequantised before it is asked for."""

    def __init__(self, path: Path) -> None:
        """Raises CorruptFileError for a malformed or truncated file, UnsupportedModelError for a tensor type or
        format version that is not implemented."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # mmap refuses an empty file
            raise CorruptFileError(f"{path} is empty: download it again.") from error
        try:
            header = _HeaderReader(self._data)
            self.metadata, self.tensors = header.read()
        except _MalformedError as error:
            raise CorruptFileError(f"{path} is not a readable GGUF file ({error}): download it again.") from error
        except _UnsupportedError as error:
            raise UnsupportedModelError(f"{path}: {error}.") from error
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str, *, rows: np.ndarray | None = None) -> np.ndarray:
        """The tensor, or these entries of its first axis, as float32, dequantised."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        shape, (type_name, raw) = self.shapes[name], self.stored(name)
        kind, chosen = GGMLQuantizationType[type_name], slice(None) if rows is None else rows
        if len(shape) == 1:  # a block spans entries of the first axis
            values = dequantize(raw, kind)[chosen]
        else:
            values = dequantize(raw.reshape(shape[0], -1)[chosen], kind)
        return np.ascontiguousarray(values, np.float32).reshape(-1, *shape[1:])

    def stored(self, name: str) -> tuple[str, np.ndarray]:
        """The tensor's type and blocks, uint8, as they lie in the file."""
        tensor = self.tensors[name]
        return tensor.type_name, np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)


class _MalformedError(Exception):
    """What is wrong with the bytes."""


class _UnsupportedError(Exception):
    """What a well-formed file asks for and is not implemented."""


class _HeaderReader:
    """Walks the header once; every count is checked against the bytes that are left before it is believed."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._take(4) != b"GGUF":
            raise _MalformedError("it does not start with GGUF")
        version = self._scalar("I")
        if version & 0xFFFF == 0:
            raise _UnsupportedError("big-endian GGUF files are not supported; use a little-endian one")
        if version not in (2, 3):
            raise _UnsupportedError(f"GGUF version {version} is not supported; versions 2 and 3 are")
        num_tensors = self._count(min_bytes=24)
        num_keys = self._count(min_bytes=13)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in metadata:
                raise _MalformedError(f"the key {key[:80]!r} comes twice")
            metadata[key] = self._value(self._scalar("I"))
        if metadata.get("split.count", 0) not in (0, 1):
            raise _UnsupportedError("split GGUF files are not supported; join the parts with llama-gguf-split --merge")
        return metadata, self._tensors(num_tensors, metadata.get("general.alignment", 32))

    def _tensors(self, count: int, alignment: Any) -> dict[str, GGUFTensor]:
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise _MalformedError(f"alignment {alignment!r} is not a power of two")
        infos = []
        for _ in range(count):
            name, num_dims = self._string(), self._scalar("I")
            if not 1 <= num_dims <= _MAX_DIMS:
                raise _MalformedError(f"tensor {name[:80]!r} has {num_dims} dimensions")
            dims = tuple(self._scalar("Q") for _ in range(num_dims))
            infos.append((name, dims, self._scalar("I"), self._scalar("Q")))
        start = -(-self._position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, dims, type_number, offset in infos:
            if name in tensors:
                raise _MalformedError(f"tensor {name[:80]!r} comes twice")
            tensors[name] = self._tensor(name, dims, type_number, start + offset)
        return tensors

    def _tensor(self, name: str, dims: tuple[int, ...], type_number: int, offset: int) -> GGUFTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(type_number)
        except ValueError:
            raise _UnsupportedError(f"tensor {name[:80]!r} has the unknown type {type_number}") from None
        if kind.name not in TENSOR_TYPES:
            supported = ", ".join(TENSOR_TYPES)
            raise _UnsupportedError(f"tensor {name[:80]!r} has type {kind.name}; supported are {supported}")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = math.prod(dims)
        if not 0 < elements < _MAX_ELEMENTS or dims[0] % block:
            raise _MalformedError(f"tensor {name[:80]!r} cannot have the shape {dims}")
        num_bytes = elements // block * block_bytes
        if offset + num_bytes > len(self._data):
            raise _MalformedError(f"tensor {name[:80]!r} lies beyond the end of the file; it was cut short")
        return GGUFTensor(name, kind.name, dims[::-1], offset, num_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise _MalformedError(f"a metadata value has the unknown type {kind}")
        element = self._scalar("I")
        if element in _SCALARS:
            size = struct.calcsize(_SCALARS[element])
            count = self._count(min_bytes=size)
            return list(struct.unpack(f"<{count}{_SCALARS[element]}", self._take(count * size)))
        if element != _STRING:
            raise _MalformedError(f"a metadata array has entries of the unknown type {element}")
        return self._strings(self._count(min_bytes=8))

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Vocabularies and merges, hundreds of thousands: in one loop, without a call for each."""
        data, size, position, read_length = self._data, len(self._data), self._position, struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + read_length(data, position)[0]
                if position > size:
                    raise _MalformedError("it ends in the middle of its header")
                strings.append(data[start:position].decode("utf-8"))
        except struct.error:
            raise _MalformedError("it ends in the middle of its header") from None
        except UnicodeDecodeError:
            raise _MalformedError("a string is not UTF-8") from None
        self._position = position
        return strings

    def _count(self, *, min_bytes: int) -> int:
        count = self._scalar("Q")
        if count * min_bytes > len(self._data) - self._position:
            raise _MalformedError(f"it announces {count} entries, more than it has room for")
        return count

    def _scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _take(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._data):
            raise _MalformedError("it ends in the middle of its header")
        raw = self._data[self._position : end]
        self._position = end
        return raw
