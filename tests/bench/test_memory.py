"""benchmarks/memory.py: a whole run on a tiny model, and commands that fail."""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts what Linux counts")


@pytest.fixture
def memory(script: ModuleType) -> ModuleType:
    return script


def test_whole_run(memory, tiny_llama, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.import_module("results_file"), "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    memory.main([str(tiny_llama), "--max-tokens", "4", "--repeats", "1", "--save"])
    results = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "results" / "memory-tiny-llama.json").read_text()) == results
    assert results["peak_bytes"] > results["weight_bytes"] + results["kv_bytes"] > 0
    assert results["kv_bytes"] % results["tokens"] == 0
    assert results["tokens"] > 4
    assert results["file_bytes"] == sum(path.stat().st_size for path in tiny_llama.iterdir())
    assert set(results["first_token_seconds"]) == {"cold", "warm"}
    assert min(results["first_token_seconds"].values()) > 0


def test_a_command_that_fails_says_why(memory, capfdbinary):
    with pytest.raises(SystemExit, match="ended with code 2"):
        memory.run("generate", "no-such-model", "--prompt", "x")
    assert b"no model 'no-such-model'" in capfdbinary.readouterr().err
