"""A model's weights as the native engine holds them.

Matrices are packed for the kernels straight from the file's own blocks, at some gigabytes a second: faster than a disk
would give back a packed copy, so none is kept. Only fitting 4-bit quants to floats takes longer: about a second for
each 500 million on two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline import _native
from paceline.config import Quantization
from paceline.errors import CacheError, ConfigError, CorruptFileError
from paceline.models.loader import LoadedModel
from paceline.models.weights import LazyWeights, StoredMatrix

_FLOATS = ("F32", "F16", "BF16")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")  # int8 where the other matrices are int4
_BAR_FROM_BYTES = 1 << 30  # of the file: below that, a bar would only flash


@dataclass(frozen=True)
class PackedWeights:
    """Weights by canonical name; lm_head.weight is absent where the head is the embedding."""

    matrices: Mapping[str, _native.PackedMatrix]
    vectors: Mapping[str, np.ndarray]  # float32: norms as effective multipliers, biases, rope factors


def pack_model(
    model: LoadedModel,
    *,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    quantization: Quantization | None = None,
    progress: bool = False,
) -> PackedWeights:
    """The weights of a model in the types that are asked for.

    dtype: "auto" keeps every value of the file as it is, quants and scales included; the others dequantise and round.
    quantization: of an unquantised checkpoint, the embedding and the head to 8 bits in either case. progress: show a
    bar on stderr for a large model. Raises ConfigError for a quantization of quants or together with a dtype,
    CorruptFileError for values that are not finite, CacheError where memory does not hold the weights.
    """
    matrices = _stored_matrices(model.weights)
    if quantization is not None:
        _check_quantization(model, dtype=dtype, quantization=quantization)
    num_bytes = sum(matrix.data.nbytes for matrix in matrices.values())
    packed = {}
    with _bar(num_bytes, show=progress and num_bytes >= _BAR_FROM_BYTES) as advance:
        for name, matrix in matrices.items():
            format_name = _format(name, matrix.type_name, dtype=dtype, quantization=quantization)
            try:
                packed[name] = _packed(matrix, format_name)
            except ValueError as error:
                raise CorruptFileError(_not_finite(name, model)) from error
            except MemoryError as error:
                raise CacheError(
                    f"the packed weights of {model.name} take more memory than there is: try a smaller model."
                ) from error
            advance(matrix.data.nbytes)
    vectors = {name: np.asarray(model.weights[name], np.float32) for name in model.weights if name not in matrices}
    for name, values in vectors.items():
        if not np.isfinite(values).all():
            raise CorruptFileError(_not_finite(name, model))
    return PackedWeights(packed, vectors)


def is_quantised(model: LoadedModel) -> bool:
    """Some matrix of its file is in quants rather than floats."""
    return any(matrix.type_name not in _FLOATS for matrix in _stored_matrices(model.weights).values())


def _stored_matrices(weights: Mapping[str, np.ndarray]) -> dict[str, StoredMatrix]:
    """The matrices among the weights, by canonical name, unread where a file has them."""
    if isinstance(weights, LazyWeights):
        return {name: weights.stored(name) for name in weights.matrix_names}
    matrices = {}
    for name, values in weights.items():
        if values.ndim == 2:
            data = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)
            matrices[name] = StoredMatrix("F32", data, values.shape, None)
    return matrices


def _check_quantization(model: LoadedModel, *, dtype: str, quantization: Quantization) -> None:
    if is_quantised(model):
        raise ConfigError(
            f"quantization {quantization} is for unquantised checkpoints; {model.name} is {model.precision} already: "
            "drop it."
        )
    if dtype != "auto":
        raise ConfigError(f"quantization {quantization} decides the weights' type; dtype {dtype} cannot: drop one.")


def _format(name: str, type_name: str, *, dtype: str, quantization: Quantization | None) -> str:
    """The packed format of a matrix."""
    if quantization is not None:
        return "q4_1" if quantization == "int4" and name not in _VOCABULARY else "i8"
    return {"auto": _native.packed_format(type_name), "float32": "f32", "bfloat16": "bf16"}[dtype]


def _packed(matrix: StoredMatrix, format_name: str) -> _native.PackedMatrix:
    packed = _native.pack_ggml(matrix.type_name, matrix.data, *matrix.shape, matrix.rows)
    if packed.format == format_name:
        return packed
    values = packed.unpack()
    del packed  # its memory is taken again
    return _native.pack_floats(values, format_name)


def _not_finite(name: str, model: LoadedModel) -> str:
    return f"{name} in {model.path} has values that are NaN or infinite: download the model again."


@contextmanager
def _bar(total: int, *, show: bool) -> Iterator[Callable[[float], None]]:
    """A progress bar; yields the function that adds to what is done."""
    if not show:
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("Packing weights", total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)
