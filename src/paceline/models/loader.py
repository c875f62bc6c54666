"""Loads a model: description, weights and tokenizer, whatever file format they come in."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import CorruptFileError
from paceline.models.architecture import ModelSpec
from paceline.models.catalog import resolve
from paceline.models.gguf_file import GGUFFile
from paceline.models.gguf_weights import gguf_weights
from paceline.models.safetensors_file import SafetensorsFolder, safetensors_weights
from paceline.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be given to a runner."""

    name: str  # as the user wrote it
    path: Path  # a .gguf file or a Hugging Face folder
    spec: ModelSpec
    tokenizer: Tokenizer
    weights: Mapping[str, np.ndarray]  # float32 by canonical name; the loader's are read anew at each access
    precision: str  # for people, such as "4-bit GGUF (Q4_1, head Q8_0)"


def load(model: str, *, progress: bool = True) -> LoadedModel:
    """A model by catalog name, Hugging Face folder, GGUF file or hub id; fetched first if need be.

    Weights are memory-mapped and read when asked for. Raises the ModelErrors of paceline.errors.
    """
    path = resolve(model, progress=progress)
    return _load_folder(model, path) if path.is_dir() else _load_gguf(model, path)


def _load_gguf(name: str, path: Path) -> LoadedModel:
    file = GGUFFile(path)
    _check_layers(path, file.metadata.get(f"{file.metadata.get('general.architecture')}.block_count"), file.shapes)
    try:
        spec = ModelSpec.from_gguf(file.metadata, tensor_names=file.tensors)
    except (TypeError, ValueError, ArithmeticError, IndexError) as error:
        raise CorruptFileError(f"the metadata of {path} are malformed ({error}): download it again.") from error
    return LoadedModel(
        name=name,
        path=path,
        spec=spec,
        tokenizer=Tokenizer.from_gguf(file.metadata),
        weights=gguf_weights(file, spec),
        precision=_gguf_precision(file),
    )


def _load_folder(name: str, path: Path) -> LoadedModel:
    config_path = path / "config.json"
    folder = SafetensorsFolder(path)
    try:
        config = json.loads(config_path.read_text("utf-8"))
        _check_layers(path, config.get("num_hidden_layers"), folder.shapes)
        spec = ModelSpec.from_hf_config(config)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{config_path} is malformed ({error}): download the model again.") from error
    return LoadedModel(
        name=name,
        path=path,
        spec=spec,
        tokenizer=Tokenizer.from_folder(path),
        weights=safetensors_weights(folder, spec),
        precision=f"{folder.precision} safetensors",
    )


def _check_layers(path: Path, num_layers: Any, tensors: Collection[str]) -> None:
    """A damaged count could announce billions of layers, which would be described one by one."""
    if isinstance(num_layers, int) and num_layers > len(tensors):
        raise CorruptFileError(
            f"{path} announces {num_layers} layers but has {len(tensors)} tensors: download it again."
        )


def _gguf_precision(file: GGUFFile) -> str:
    """The mixture that the file is known by, and the head's type where most other weights have another."""
    head = file.tensors.get("output.weight", file.tensors.get("token_embd.weight"))
    counts: dict[str, int] = {}
    for tensor in file.tensors.values():
        if tensor is not head:
            counts[tensor.type_name] = counts.get(tensor.type_name, 0) + math.prod(tensor.shape)
    assert head is not None, "checked with the weights' shapes"
    main = max(counts, key=lambda name: counts[name])
    if main in ("F32", "F16", "BF16"):
        return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[main] + " GGUF"
    label = _file_type(file) or main
    head_note = "" if head.type_name == main else f", head {head.type_name}"
    return f"{label[1]}-bit GGUF ({label}{head_note})"


def _file_type(file: GGUFFile) -> str | None:
    """Such as "Q4_K_M", a mixture that the tensors' types do not name."""
    from gguf import LlamaFileType

    try:
        name = LlamaFileType(file.metadata.get("general.file_type")).name
    except ValueError:
        return None
    return name.removeprefix("MOSTLY_") if name.startswith("MOSTLY_Q") else None
