"""`paceline profile` on a tiny model."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.models.loader import load
from paceline.models.weights import expected_shapes

SHORT = ("--context", "48", "--repeats", "2", "--kv-cache-memory", "4M", "--threads", "1")


def invoke(*args, exit_code=0):
    result = CliRunner().invoke(app, ["profile", *map(str, args)])
    assert result.exit_code == exit_code, result.output
    return result


def test_json(tiny_llama):
    value = json.loads(invoke(tiny_llama, *SHORT, "--tokens", "4, 1,2,1", "--speculation", "ngram", "--json").stdout)
    assert [cost["tokens"] for cost in value["target"]] == [1, 2, 4]
    drafts = [(cost["drafter"], cost["tokens"], cost["budget"]) for cost in value["drafters"]]
    assert drafts == [("ngram", 1, 1), ("ngram", 3, 3)]
    for cost in (*value["target"], *value["drafters"]):
        assert 0 < cost["low_ms"] <= cost["ms"] <= cost["high_ms"]
    assert value["floor_ms"] == pytest.approx(value["weight_bytes"] / value["bandwidth_gb_s"] * 1e-6)
    assert value["settings"]["context"] == 48
    assert value["environment"]["cores"] >= 1


def test_weights_and_kv_are_those_of_the_model(tiny_llama):
    value = json.loads(invoke(tiny_llama, *SHORT, "--engine", "torch", "--tokens", "1", "--json").stdout)
    spec = load(str(tiny_llama)).spec
    parameters = sum(rows * (columns or [1])[0] for rows, *columns in expected_shapes(spec).values())
    assert value["weight_bytes"] == 4 * parameters  # the embedding is the head
    assert value["kv_bytes_per_token"] == spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * 4


def test_table(tiny_llama):
    output = invoke(tiny_llama, *SHORT, "--tokens", "1,6", "--speculation", "ngram").stdout
    assert "1.00x" in output
    assert "ngram drafts 5 in" in output
    assert "floor" in output


@pytest.mark.parametrize("method", ["recycle", "suffix", "ngram+recycle"])
def test_a_drafter_may_draft_less_than_it_is_allowed(tiny_llama, tmp_path, method):
    value = json.loads(invoke(tiny_llama, *SHORT, "--tokens", "1,3,40", "--speculation", method, "--json").stdout)
    assert [cost["budget"] for cost in value["drafters"]] == [2, 8]
    assert all(0 < cost["tokens"] <= cost["budget"] for cost in value["drafters"])


def test_a_table_is_not_written(tiny_llama, tmp_path):
    table = tmp_path / "table.npz"
    speculation = json.dumps({"method": "recycle", "table": str(table)})
    invoke(tiny_llama, *SHORT, "--tokens", "1,3", "--speculation", speculation)
    assert not table.exists()


def test_no_drafter_is_no_drafts(tiny_llama):
    value = json.loads(invoke(tiny_llama, *SHORT, "--tokens", "1", "--speculation", "none", "--json").stdout)
    assert value["drafters"] == []


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_plot(tiny_llama, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"curve.{suffix}"
    invoke(tiny_llama, *SHORT, "--tokens", "1,2", "--plot", path)
    assert path.read_bytes()[:5] == {"svg": b"<?xml", "png": b"\x89PNG\r"}[suffix]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "1,0"], "--tokens must be numbers from 1"),
        (["--tokens", ""], "--tokens must be numbers from 1"),
        (["--tokens", "1,,2"], "--tokens must be numbers from 1"),
        (["--context", "0"], "--context must be an integer >= 1; got 0: try 256."),
        (["--repeats", "0"], "--repeats must be an integer >= 1"),
        (["--plot", "curve.pdf"], "--plot must be an .svg or .png file"),
        (["--plot", "no/curve.svg"], "there is no such folder"),
        (["--context", "500"], "do not fit into the 512 tokens"),
    ],
)
def test_wrong_options(tiny_llama, options, words):
    assert words in invoke(tiny_llama, *SHORT, *options, exit_code=2).stderr


def test_plot_without_matplotlib(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("never loaded", "--plot", tmp_path / "curve.svg", exit_code=2)
    assert result.stderr == "error: --plot needs matplotlib: pip install 'paceline[bench]'.\n"
