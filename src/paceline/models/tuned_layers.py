"""The layers that `paceline tune-layers` found: kept in the cache folder, found again by the model's files."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import CorruptFileError
from paceline.models.catalog import cache_folder
from paceline.models.json_file import read_json, write_json

_SAMPLE = 1 << 20  # bytes read at each end of a file


@dataclass(frozen=True, slots=True)
class TunedLayers:
    """What the search found, and on what."""

    model: str  # as the user wrote it
    layers: tuple[int, ...]  # those that run, ascending
    num_speculative_tokens: int  # the draft length that paid most
    agreement: float  # share of tokens that the layers guess
    speedup: float  # of decoding, as the search estimates it
    num_tokens: int  # on which they were compared

    def __post_init__(self) -> None:
        if not self.layers or self.layers[0] < 0 or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers must be ascending integers >= 0, not {list(self.layers)!r:.60}")


def fingerprint(path: Path) -> str:
    """32 hex digits that tell a GGUF file's or a folder's weights from others without reading all of them: names,
    sizes and both ends of each file."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}:{size}:".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLE))
            stream.seek(max(0, size - _SAMPLE))
            digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()[:32]


def tuned_path(path: Path) -> Path:
    """Where the tuned layers of the model at this path are kept, whether they are there or not."""
    return cache_folder() / "layer_skip" / f"{fingerprint(path)}.json"


def write_tuned(path: Path, tuned: TunedLayers) -> None:
    """Keeps what was found for the model at this path."""
    write_json(tuned_path(path), asdict(tuned))


def read_tuned(path: Path, *, num_layers: int) -> TunedLayers | None:
    """What was found for the model of num_layers at this path, None if nothing was. Raises CorruptFileError for a
    damaged file."""
    file = tuned_path(path)
    value = read_json(file)
    if value is None:
        return None
    try:
        tuned = TunedLayers(**{**value, "layers": tuple(map(int, value["layers"]))})
        if tuned.layers[-1] >= num_layers:
            raise ValueError(f"the model has layers 0 to {num_layers - 1}, not {tuned.layers[-1]}")
        return tuned
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise CorruptFileError(f"{file} is malformed ({error}): run `paceline tune-layers` again.") from error
