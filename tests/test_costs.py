"""Costs of passes on disk: measured once, read again, and never in the way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline import LLM, EngineConfig, costs
from paceline.config import CacheConfig
from paceline.models.catalog import cache_folder

CONFIG = EngineConfig(cache=CacheConfig(kv_cache_memory=4 << 20), num_threads=1)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    return cache_folder() / "costs"


@pytest.fixture
def measured(monkeypatch) -> list[int]:
    """One entry for each time that a runner was measured."""
    calls: list[int] = []
    measure = costs.measure

    def counting(runner, *, max_rows):
        calls.append(max_rows)
        return measure(runner, max_rows=max_rows)

    monkeypatch.setattr(costs, "measure", counting)
    return calls


def test_measured_once(tiny_llama, home, measured):
    for _ in range(2):
        LLM(tiny_llama, config=CONFIG, speculation="auto", progress=False)
    assert measured == [32]
    assert len(list(home.iterdir())) == 1
    LLM(tiny_llama, config=EngineConfig(cache=CONFIG.cache, num_threads=2), speculation="auto", progress=False)
    assert len(list(home.iterdir())) == 2, "another number of threads has other costs"
    LLM(tiny_llama, config=CONFIG, speculation="suffix", progress=False)
    assert len(measured) == 2, "a fixed length needs none"


@pytest.mark.parametrize("text", ["{", "[]", '{"seconds": {"1": -1}, "seconds_per_key": 0}', ""])
def test_a_damaged_file_is_written_anew(tiny_llama, home, measured, text):
    LLM(tiny_llama, config=CONFIG, speculation="auto", progress=False)
    [file] = home.iterdir()
    file.write_text(text)
    for _ in range(2):
        LLM(tiny_llama, config=CONFIG, speculation="auto", progress=False)
    assert len(measured) == 2
    assert json.loads(file.read_text())["seconds"]["1"] > 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tiny_llama, home, measured):
    home.mkdir(parents=True)
    home.chmod(0o500)
    LLM(tiny_llama, config=CONFIG, speculation="auto", progress=False)
    home.chmod(0o700)
    assert measured == [32]


def test_a_folder_in_the_way(tiny_llama, home, measured):
    home.parent.mkdir(parents=True, exist_ok=True)
    home.write_text("a file where the folder should be")
    LLM(tiny_llama, config=CONFIG, speculation="auto", progress=False)
    assert measured == [32]
