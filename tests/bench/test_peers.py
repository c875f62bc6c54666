"""What the scripts in benchmarks/peers share: one workload, one way to measure, an environment for each peer."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def peers(monkeypatch):
    """The shared modules."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    names = ("environment", "measuring", "workload")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        del sys.modules[name]


def test_section_adds_requests_up(peers):
    section = peers.measuring.section([peers.measuring.Output([1, 2, 3], 0.5, 1.0), peers.measuring.Output([4], 1, 1)])
    assert section["tokens"] == 4
    assert section["tokens_per_second"] == 2.0
    assert section["decode_tokens_per_second"] == 4.0  # two tokens after the first ones, in half a second


def test_measure_calls(peers):
    """No two prefill runs begin alike, and each prompt is run once, to the full length."""
    calls = []

    def generate(ids, max_tokens):
        calls.append((ids, max_tokens))
        return peers.measuring.Output([7] * max_tokens, 0.25, 0.5)

    prompts = [{"category": "code", "ids": [1]}, {"category": "chat", "ids": [2]}, {"category": "code", "ids": [3]}]
    report = peers.measuring.measure({"prefill_ids": list(range(100)), "max_tokens": 9, "prompts": prompts}, generate)
    assert report["prefill_tokens_per_second"] == 200
    assert report["outputs"] == [[7] * 9] * 3
    assert [report["by_category"][name]["requests"] for name in ("code", "chat")] == [2, 1]
    prefills, requests = calls[:-3], calls[-3:]
    assert len({ids[0] for ids, _ in prefills}) == len(prefills) > 1
    assert all(sorted(ids) == list(range(100)) and count == 1 for ids, count in prefills)
    assert requests == [([1], 9), ([2], 9), ([3], 9)]


def test_perplexity_of_a_uniform_law_is_its_size(peers):
    chunks = []

    def log_likelihood(ids):
        chunks.append(ids)
        return (len(ids) - 1) * -3.0

    report = peers.measuring.perplexity(list(range(1500)), log_likelihood)
    assert report == {"tokens": 1022, "perplexity": pytest.approx(20.0855369)}  # e^3
    assert chunks == [list(range(512)), list(range(512, 1024))]
    with pytest.raises(SystemExit, match="511 tokens"):
        peers.measuring.perplexity(list(range(511)), log_likelihood)


def test_workload_has_the_ids_that_paceline_runs(peers, smollm2_path):
    prompts = BENCHMARKS / "prompts.jsonl"
    options = peers.workload.parser("usage").parse_args(
        [str(smollm2_path), "--prompts", str(prompts), "--prompt-lookup"]
    )
    given, model = peers.workload.create(options)
    assert given == json.loads(json.dumps(given))
    assert len(given["prefill_ids"]) == 1000
    assert len(given["prompts"]) == 14
    assert given["draft_tokens"] == 5
    first = json.loads(prompts.read_text("utf-8").splitlines()[0])["turns"][0]
    assert given["prompts"][0]["ids"] == model.tokenizer.encode_chat([{"role": "user", "content": first}])


def test_environment_is_made_once_and_anew_when_pins_change(peers, tmp_path, monkeypatch):
    commands = []

    def run(command, **options):
        commands.append(command[1:])
        if "venv" in command:
            (tmp_path / "peers" / "peer").mkdir(parents=True)
        return subprocess.CompletedProcess(command, int("broken" in command))

    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run)
    python = peers.environment.prepare("peer", [["numpy==1"]])
    assert python == tmp_path / "peers" / "peer" / "bin" / "python"
    assert [command[1] for command in commands] == ["venv", "pip"]
    peers.environment.prepare("peer", [["numpy==1"]])
    assert len(commands) == 2
    peers.environment.prepare("peer", [["numpy==2"]])
    assert commands[-1][-1] == "numpy==2"
    for _ in range(2):  # a failed installation is not taken for a finished one
        with pytest.raises(SystemExit, match="could not install the peer"):
            peers.environment.prepare("peer", [["broken"]])
    assert len(commands) == 8
