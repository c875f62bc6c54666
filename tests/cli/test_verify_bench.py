"""`paceline verify` and `paceline bench` on a tiny model, and the exit codes of what verify finds."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.bench.equality import Divergence, Equality
from paceline.cli.main import app

SHORT = ("--max-tokens", "16", "--kv-cache-memory", "4M", "--threads", "1", "--speculation", "ngram")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [
        {"id": f"{category}-{i}", "category": category, "turns": [f"{category} {i} ab ab ab"]}
        for i in range(3)
        for category in ("chat", "code")
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def invoke(*args, exit_code=0):
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code == exit_code, result.output
    return result


@pytest.mark.parametrize("options", [(), ("--temperature", "0.8"), ("--concurrency", "3")])
def test_verify_finds_the_same_ids(tiny_llama, prompts, options):
    value = json.loads(invoke("verify", tiny_llama, "--prompts", prompts, *SHORT, *options, "--json").stdout)
    assert (value["prompts"], value["identical"], value["ties"], value["divergences"]) == (6, 6, 0, [])
    assert value["lossless"] is True
    assert value["tokens"] > 6


def test_verify_prints_a_line(tiny_llama, prompts):
    result = invoke("verify", tiny_llama, "--prompts", prompts, "--limit", "2", *SHORT)
    assert "2 of 2 prompts identical" in result.stdout


@pytest.mark.parametrize(
    ("margins", "exit_code"), [([], 0), ([5e-4], 0), ([2e-3], 1), ([5e-4, 2e-3], 1)], ids=["same", "tie", "no", "both"]
)
def test_verify_exit_code(tiny_llama, prompts, monkeypatch, margins, exit_code):
    divergences = tuple(Divergence(f"chat-{i}", 4, 7, 8, margin, tie=margin < 1e-3) for i, margin in enumerate(margins))
    monkeypatch.setattr("paceline.cli.verify.compare", lambda *a, **k: Equality(6, 96, divergences, True))
    result = invoke("verify", tiny_llama, "--prompts", prompts, *SHORT, "--json", exit_code=exit_code)
    value = json.loads(result.stdout)
    assert value["identical"] == 6 - len(margins)
    assert value["ties"] == sum(margin < 1e-3 for margin in margins)
    assert [item["margin"] for item in value["divergences"]] == margins


def test_a_lossy_rule_is_caught(tiny_llama, prompts):
    lossy = '{"method": "ngram", "verification": "typical", "typical_epsilon": 1e-9, "typical_alpha": 1e-9}'
    result = invoke(
        "verify", tiny_llama, "--prompts", prompts, *SHORT[:6], "--temperature", "0.3", "--speculation", lossy,
        "--json", exit_code=1,
    )  # fmt: skip
    value = json.loads(result.stdout)
    assert value["lossless"] is False
    assert value["identical"] < value["prompts"]
    assert all(item["margin"] >= 0 for item in value["divergences"])


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_no_drafter_is_refused(tiny_llama, prompts, command):
    result = invoke(command, tiny_llama, "--prompts", prompts, "--speculation", "none", exit_code=2)
    assert result.stderr.startswith("error: --speculation none leaves nothing to compare")


def test_bench_json(tiny_llama, prompts, tmp_path):
    path = tmp_path / "result.json"
    options = ("--per-category", "2", "--repeats", "2", "--save", path)
    value = json.loads(invoke("bench", tiny_llama, "--prompts", prompts, *SHORT, *options, "--json").stdout)
    assert json.loads(path.read_text()) == value
    for mode in ("plain", "speculative"):
        assert set(value[mode]["by_category"]) == {"chat", "code"}
        assert value[mode]["requests"] == 4
        assert value[mode]["tokens"] == value["plain"]["tokens"]
        assert value[mode]["wall_seconds"] >= value[mode]["prefill_seconds"] + value[mode]["decode_seconds"]
    rates = [value[mode]["tokens_per_second"] for mode in ("speculative", "plain")]
    assert value["speedup"] == pytest.approx(rates[0] / rates[1])
    assert value["acceptance_length"] >= 1
    assert 0 <= value["acceptance_rate"] <= 1
    assert value["identical"] == 4
    assert value["settings"]["speculation"]["method"] == "ngram"
    assert value["environment"]["cores"] >= 1


def test_bench_table_and_concurrency(tiny_llama, prompts):
    result = invoke("bench", tiny_llama, "--prompts", prompts, *SHORT, "--concurrency", "4", "--category", "code")
    assert "code" in result.stdout
    assert "chat" not in result.stdout
    assert "3 of 3 prompts identical\n" in result.stdout


@pytest.mark.parametrize(
    ("repeats", "words"),
    [(1, "one run of each prompt, which shows no spread"), (2, "medians of 2 runs, whose speed-ups")],
)
def test_bench_says_what_is_known_of_the_spread(tiny_llama, prompts, monkeypatch, repeats, words):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("paceline.cli.bench.describe_environment", lambda: {"cpu": "Some Processor", "cores": 2})
    lines = invoke("bench", tiny_llama, "--prompts", prompts, *SHORT, "--repeats", repeats).stdout.splitlines()
    assert [line for line in lines if line.startswith(words)]
    assert max(map(len, lines)) <= 80
    assert lines[-3].endswith("6 of 6 prompts identical")
    assert lines[-1] == "Some Processor, 2 cores"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--compare", "llama"), "--compare knows no 'llama': it takes torch, "),
        (("--compare", "openvino", "--temperature", "1"), "--temperature does not go with --compare"),
        (("--compare", "openvino", "--limit", "3"), "--limit does not go with --compare"),
    ],
)
def test_comparisons_that_cannot_be_are_refused(prompts, options, words):
    assert words in invoke("bench", "never loaded", "--prompts", prompts, *options, exit_code=2).stderr


def test_a_comparison_runs_paceline_twice_and_each_peer(prompts, monkeypatch, tmp_path):
    """The peers themselves are measured elsewhere; here none is installed."""
    ran: list[tuple[str, ...]] = []

    def run(contestant, workload):
        ran.append((contestant.script, *contestant.flags))
        system = "peer plain" if contestant.script == "openvino_pipeline" else f"Paceline {len(ran) % 3}"
        rates = {f"{name}tokens_per_second": 10.0 for name in ("", "decode_", "prefill_")}
        return {"system": system, "requests": 6, **rates, "by_category": {"chat": rates}, "outputs": [[1]]}

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    script = importlib.import_module("compare")
    monkeypatch.setattr(script, "run", run)
    options = ("--compare", "openvino", "--repeats", "2", "--save", tmp_path / "x.json", "--speculation", "suffix")
    result = invoke("bench", "smollm2-135m", "--prompts", prompts, *options)
    own = [("paceline_generate",), ("paceline_generate", "--speculation", "suffix"), ("openvino_pipeline",)]
    assert ran == own * 2
    assert "| peer plain | 10.0 |" in result.stdout
    assert json.loads((tmp_path / "x.json").read_text())["settings"]["repeats"] == 2
    for name in ("compare", "readme_table", "results_file"):
        sys.modules.pop(name, None)


def test_save_is_checked_before_the_measurement(prompts, tmp_path):
    for path, words in (
        (tmp_path / "no" / "x.json", "there is no such folder"),
        (tmp_path, "is a folder"),
        ("", "is a folder"),
    ):
        result = invoke("bench", "never loaded", "--prompts", prompts, "--save", path, exit_code=2)
        assert words in result.stderr


def test_a_save_that_fails_loses_no_report(tiny_llama, prompts):
    options = ("--limit", "1", "--save", "/dev/full", "--json")
    if Path("/dev/full").exists():
        result = invoke("bench", tiny_llama, "--prompts", prompts, *SHORT, *options, exit_code=2)
        assert json.loads(result.stdout)["speedup"] > 0
        assert "No space left" in result.stderr
