"""`paceline tune-layers` on a tiny model: found, kept, used, and taken up again after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.bench.layer_agreement import LayerAgreement
from paceline.cli import tune_layers
from paceline.cli.main import app
from paceline.models.tuned_layers import read_tuned, tuned_path

SHORT = ("--max-tokens", "9", "--threads", "1", "--kv-cache-memory", "4M")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": str(i), "category": "chat", "turns": [f"number {i}"]} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def invoke(*args, exit_code=0):
    result = CliRunner().invoke(app, ["tune-layers", *map(str, args)])
    assert result.exit_code == exit_code, result.output
    return result


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_what_is_found_is_kept(tiny_llama, prompts, engine):
    value = json.loads(
        invoke(tiny_llama, "--prompts", prompts, "--limit", 2, *SHORT, "--engine", engine, "--json").stdout
    )
    assert value["layers"] in ([0], [1])
    assert value["num_tokens"] == 2 * 9
    assert 0 <= value["agreement"] <= 1
    tuned = read_tuned(tiny_llama, num_layers=2)
    assert tuned is not None
    assert list(tuned.layers) == value["layers"]
    assert [path.name for path in tuned_path(tiny_llama).parent.iterdir()] == [tuned_path(tiny_llama).name]


def test_it_says_what_to_expect(tiny_llama, prompts):
    result = invoke(tiny_llama, "--prompts", prompts, *SHORT)
    assert "1 of 2 layers guess" in result.stdout
    assert "of 27 tokens" in result.stdout
    assert f"kept in {tuned_path(tiny_llama)}" in result.stderr


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: int) -> None:
    """Ctrl-C in the middle of the call of owner's function that follows the first so many."""
    function, calls = getattr(owner, name), []

    def interrupted(*args, **options):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(args)
        return function(*args, **options)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize(
    ("owner", "name", "after", "num_kept"),
    [
        (tune_layers, "submit", 2, 2),  # while the third prompt is answered
        (tune_layers, "measure_costs", 0, 3),
        (LayerAgreement, "__call__", 1, 5),  # three answers, the costs, one subset
    ],
)
def test_an_interrupted_search_goes_on_where_it_was(tiny_llama, prompts, monkeypatch, owner, name, after, num_kept):
    with monkeypatch.context() as patch:
        interrupt(patch, owner, name, after=after)
        assert invoke(tiny_llama, "--prompts", prompts, *SHORT, exit_code=130).stderr.endswith("interrupted\n")
    assert read_tuned(tiny_llama, num_layers=2) is None
    result = invoke(tiny_llama, "--prompts", prompts, *SHORT)
    assert f"going on after {num_kept} results of an earlier run" in result.stderr
    assert read_tuned(tiny_llama, num_layers=2) is not None


def test_other_prompts_are_another_search(tiny_llama, prompts, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, LayerAgreement, "__call__", after=1)
        invoke(tiny_llama, "--prompts", prompts, *SHORT, exit_code=130)
    assert "earlier run" not in invoke(tiny_llama, "--prompts", prompts, "--limit", 2, *SHORT).stderr


def test_damaged_results_are_measured_anew(tiny_llama, prompts, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, LayerAgreement, "__call__", after=1)
        invoke(tiny_llama, "--prompts", prompts, *SHORT, exit_code=130)
    [file] = tuned_path(tiny_llama).parent.iterdir()
    value = json.loads(file.read_text())
    answer = value["values"]["answer 0"]
    for content in (
        file.read_text()[:-30],
        b"\xff\xfe",
        [],
        "text",
        {"values": value["values"]},
        {"key": value["key"], "checksum": value["checksum"]},
        *(
            value | {"values": value["values"] | junk}
            for junk in (
                {"0": "a half"},
                {"0": float("nan")},
                {"0,7": 0.5},
                {"costs": {}},
                {"costs": {"passes": ["1"], "fixed": 0.1, "layer": "0.2"}},
                {"answer 0": None},
                {"answer 0": answer | {"token_ids": [10**9]}},
                {"answer 0": answer | {"prompt_length": -4}},
            )
        ),
        value | {"values": []},
        value | {"values": {}},
    ):
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        result = invoke(tiny_llama, "--prompts", prompts, *SHORT)
        assert f"the results of an earlier run in {file} are damaged: starting afresh" in result.stderr
        assert "going on" not in result.stderr
        assert not file.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-tokens", "0"), "max_tokens must be an integer >= 1"),
        (("--limit", "0"), "--limit must be at least 1"),
        (("--kv-cache-memory", "64K"), "raise --kv-cache-memory"),
    ],
)
def test_wrong_options(tiny_llama, prompts, options, message):
    result = invoke(tiny_llama, "--prompts", prompts, *SHORT, *options, exit_code=2)
    assert message in result.stderr
