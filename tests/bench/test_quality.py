"""benchmarks/quality.py: its sums against a plain computation in float64, its texts and windows, a whole run."""

from __future__ import annotations

import importlib
import json
from types import ModuleType

import numpy as np
import pytest

from paceline.testing import ToyModel


@pytest.fixture
def quality(script: ModuleType) -> ModuleType:
    return script


def toy(**options) -> ToyModel:
    return ToyModel(vocab_size=50, max_model_len=512, **options)


def laws(model: ToyModel, quality: ModuleType, window: np.ndarray) -> np.ndarray:
    """log p of all rows [512, V] float64."""
    rows = np.concatenate(list(quality.logits(model, window))).astype(np.float64)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


def test_sums_are_those_of_the_laws(quality):
    window = np.random.default_rng(1).integers(0, 50, quality.WINDOW_TOKENS, dtype=np.int32)
    report = quality.score(toy(drift=0.3), toy(), window).report()
    own, exact = laws(toy(drift=0.3), quality, window)[:-1], laws(toy(), quality, window)[:-1]
    rows = np.arange(len(window) - 1)
    assert report["tokens"] == 511
    assert report["perplexity"] == pytest.approx(np.exp(-own[rows, window[1:]].mean()), rel=1e-5)
    assert report["reference_perplexity"] == pytest.approx(np.exp(-exact[rows, window[1:]].mean()), rel=1e-5)
    assert report["mean_kl_nats"] == pytest.approx((np.exp(exact) * (exact - own)).sum(axis=1).mean(), rel=1e-4)


def test_a_model_is_as_good_as_itself(quality):
    window = np.arange(quality.WINDOW_TOKENS, dtype=np.int32) % 50
    report = quality.score(toy(), toy(), window).report()
    assert report["mean_kl_nats"] == 0
    assert report["perplexity"] == report["reference_perplexity"]


def test_kinds_add_up(quality):
    windows = np.random.default_rng(2).integers(0, 50, (3, quality.WINDOW_TOKENS), dtype=np.int32)
    reports = quality.measure(toy(drift=0.3), toy(), {"prose": windows[:2], "list": windows[2:]})
    assert [reports[kind]["tokens"] for kind in ("prose", "list", "all")] == [1022, 511, 1533]
    weighted = sum(reports[kind]["mean_kl_nats"] * reports[kind]["tokens"] for kind in ("prose", "list"))
    assert reports["all"]["mean_kl_nats"] == pytest.approx(weighted / 1533)


@pytest.mark.parametrize("start", [[], [7]])
def test_every_window_begins_as_a_text_does(quality, start):
    found = quality.windows("x" * 2000, lambda text: start + [ord(c) for c in text], count=3)
    assert found.shape == (3, quality.WINDOW_TOKENS)
    assert found[:, : len(start)].tolist() == [start] * 3
    assert (found[:, len(start) :] == ord("x")).all()


def test_a_short_text_gives_whole_windows_only(quality):
    assert quality.windows("x" * 1023, lambda text: [1] * len(text), count=9).shape == (1, 512)
    assert quality.windows("x" * 511, lambda text: [1] * len(text), count=9).shape == (0, 512)


def test_texts_are_long_enough_and_the_same_every_time(quality):
    texts = quality.texts()
    assert texts == quality.texts()
    assert list(texts) == list(quality.KINDS)
    assert min(map(len, texts.values())) > 20_000  # characters; the list's are the fewest a token
    assert "1000," in texts["list"]


def test_whole_run(quality, tiny_llama, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.import_module("results_file"), "HERE", tmp_path)
    (tmp_path / "results").mkdir()
    quality.main([str(tiny_llama), "--limit", "1600", "--engine", "torch", "--reference", "torch", "--save"])
    results = json.loads((tmp_path / "results" / "quality-tiny-llama.json").read_text())
    assert set(results["texts"]) == {*quality.KINDS, "all"}
    assert all(row["mean_kl_nats"] == 0 for row in results["texts"].values())
    table = capsys.readouterr().out
    assert "| all | 1,533 |" in table
    assert "llama.cpp" not in table


def test_a_limit_below_a_window_of_each_kind_is_refused(quality, capsys):
    with pytest.raises(SystemExit):
        quality.main(["--limit", "1535"])
    assert "--limit must be at least 1536" in capsys.readouterr().err


def test_the_peers_column_stands_beside_ours(quality):
    row = {"tokens": 511, "perplexity": 2.0, "reference_perplexity": 1.5, "mean_kl_nats": 0.01}
    lines = quality.table({"texts": {"all": row}, "llama_cpp_perplexity": {"all": 1.75}}).splitlines()
    assert lines[-1] == "| all | 511 | 1.500 | 2.000 | 0.01 | 1.750 |"
    assert len({line.count("|") for line in lines}) == 1
