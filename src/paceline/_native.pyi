"""The native CPU engine, compiled from native/. Absent where the package was installed without a C++ compiler."""

import numpy as np

def version() -> str:
    """Version of the package that this extension was built with."""

class PackedMatrix:
    """A weight matrix [outputs, inputs] as the kernels read it. Formats: native/format.hpp."""

    def __init__(self, format: str, outputs: int, inputs: int) -> None:
        """Zeros, to be filled through `data`. Raises ValueError for an unknown format, MemoryError."""

    @property
    def format(self) -> str: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def data(self) -> np.ndarray:
        """Its memory, uint8 [num_bytes], writable."""

    def unpack(self) -> np.ndarray:
        """float32 [outputs, inputs]."""

def pack_ggml(
    type_name: str, blocks: np.ndarray, outputs: int, inputs: int, row_order: np.ndarray | None = None
) -> PackedMatrix:
    """Rows of GGUF's blocks (uint8, one after another), exactly; output i is row row_order[i] (int32).

    Raises ValueError for values that are not finite or sizes that do not fit.
    """

def pack_floats(values: np.ndarray, format: str) -> PackedMatrix:
    """float32 [outputs, inputs] rounded to f32, f16, bf16, i8 (a scale for each output) or q4_1.

    Raises ValueError for values that are not finite or an unsuitable format.
    """

def packed_format(type_name: str) -> str:
    """Name of the format that holds the values of a GGUF type."""

def packed_bytes(format: str, outputs: int, inputs: int) -> int:
    """Bytes of a packed matrix."""
