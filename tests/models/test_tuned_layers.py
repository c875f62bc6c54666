"""Tuned layers are found again by the model's files, and by nothing else."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from killing import kill_while_writing
from paceline.errors import CorruptFileError
from paceline.models.tuned_layers import TunedLayers, fingerprint, read_tuned, tuned_path, write_tuned
from tiny_llama import write_tiny_llama

TUNED = TunedLayers("tiny", (0, 2, 3), 2, 0.75, 1.2, 512)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def test_what_was_written_is_read(tiny_llama: Path) -> None:
    assert read_tuned(tiny_llama, num_layers=4) is None
    write_tuned(tiny_llama, TUNED)
    assert read_tuned(tiny_llama, num_layers=4) == TUNED


def test_a_copy_is_the_same_model_and_other_weights_are_not(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "copy")
    assert fingerprint(tmp_path / "copy") == fingerprint(tiny_llama)
    assert fingerprint(write_tiny_llama(tmp_path / "other", seed=1)) != fingerprint(tiny_llama)


def test_a_single_file_may_be_renamed(tmp_path: Path) -> None:
    for name, content in (("a.gguf", b"x" * 3_000_000), ("b.gguf", b"x" * 3_000_000), ("c.gguf", b"x" * 3_000_001)):
        (tmp_path / name).write_bytes(content)
    a, b, c = (fingerprint(tmp_path / name) for name in ("a.gguf", "b.gguf", "c.gguf"))
    assert a == b != c


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "malformed"),
        ('{"layers": [0]}', "malformed"),
        ('{"layers": ["x"]}', "malformed"),
        *(
            (json.dumps(asdict(TUNED) | {"layers": bad}), "malformed")
            for bad in ([], [-1], [1, 0], [0, 0], [1e999], [0, 4])
        ),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tiny_llama: Path, content: str, message: str) -> None:
    path = tuned_path(tiny_llama)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(CorruptFileError, match=message) as error:
        read_tuned(tiny_llama, num_layers=4)
    assert str(path) in str(error.value)


def test_killed_while_writing(tiny_llama: Path) -> None:
    versions = [TunedLayers("tiny", tuple(range(length)), 2, 0.75, 1.2, 512) for length in (2000, 3000)]
    write_tuned(tiny_llama, versions[0])
    folder = tuned_path(tiny_llama).parent
    for _ in kill_while_writing(
        lambda count: write_tuned(tiny_llama, versions[count % 2]), folder=folder, scratch="*.part"
    ):
        assert read_tuned(tiny_llama, num_layers=3000) in versions
