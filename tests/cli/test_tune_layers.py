"""`paceline tune-layers` on a tiny model: found, kept, used, and taken up again after an interruption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.bench.layer_agreement import LayerAgreement
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
    tuned = read_tuned(tiny_llama)
    assert tuned is not None
    assert list(tuned.layers) == value["layers"]
    assert [path.name for path in tuned_path(tiny_llama).parent.iterdir()] == [tuned_path(tiny_llama).name]


def test_it_says_what_to_expect(tiny_llama, prompts):
    result = invoke(tiny_llama, "--prompts", prompts, *SHORT)
    assert "1 of 2 layers guess" in result.stdout
    assert "of 27 tokens" in result.stdout
    assert f"kept in {tuned_path(tiny_llama)}" in result.stderr


def test_an_interrupted_search_goes_on_where_it_was(tiny_llama, prompts, monkeypatch):
    measured = []
    count = LayerAgreement.__call__

    def interrupted(self, layers):
        if len(measured) == 1:
            raise KeyboardInterrupt
        measured.append(layers)
        return count(self, layers)

    with monkeypatch.context() as patch:
        patch.setattr(LayerAgreement, "__call__", interrupted)
        invoke(tiny_llama, "--prompts", prompts, *SHORT, exit_code=130)
    assert read_tuned(tiny_llama) is None
    result = invoke(tiny_llama, "--prompts", prompts, *SHORT)
    assert "going on after 5 results of an earlier run" in result.stderr  # three answers, the costs, one subset
    assert read_tuned(tiny_llama) is not None


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
