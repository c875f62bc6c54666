"""`paceline tune`, and the file that it hands to --config."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from paceline.bench.tuning import Setting, Trial, best_fixed, break_even, recommended, settings
from paceline.cli.main import app

SHORT = ("--max-tokens", "8", "--kv-cache-memory", "4M", "--threads", "1", "--lengths", "1,3", "--batches", "1,2")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": str(i), "category": "ab"[i % 2], "turns": [f"hello {i} hello"]} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def invoke(*args, exit_code=0):
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code == exit_code, result.output
    return result


def test_files_and_their_use(tiny_llama, prompts, tmp_path):
    folder = tmp_path / "new" / "tuned"
    result = invoke("tune", tiny_llama, "--prompts", prompts, *SHORT, "--save", folder, "--json")
    report = json.loads(result.stdout)
    assert [(t["length"], t["concurrency"]) for t in report["trials"]] == [(None, 1), (1, 1), (3, 1), (None, 2)]
    for trial in report["trials"]:
        assert trial["identical"] == 3
        assert trial["speedup"] > 0
        assert trial["predicted_speedup"] > 0
        assert trial["by_category"].keys() == {"a", "b"}
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tune.html", "tune.json", "tune.png"]
    assert json.loads((folder / "tune.json").read_text()) == report
    page = (folder / "tune.html").read_text()
    assert "<svg" in page
    assert "3 nodes" in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ).replace("https://matplotlib.org", "")
    config = json.loads((folder / "config.json").read_text())
    assert config == report["config"]
    output = invoke(
        "generate", tiny_llama, "--prompt", "a", *SHORT[:6], "--config", folder / "config.json", "--seed", "1"
    )
    assert output.stdout


def test_table(tiny_llama, prompts):
    output = invoke("tune", tiny_llama, "--prompts", prompts, *SHORT, "--limit", "1").output
    assert "auto, 2 at once" in output
    assert "by cost" in output
    assert "--speculation '" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "0"], "--lengths must be numbers"),
        (["--lengths", "1 2,3"], "--lengths must be numbers"),
        (["--max-tokens", "1"], "--max-tokens must be an integer >= 2"),
        (["--lengths", "100"], "--lengths must be at most 64; got 100"),
        (["--batches", "x"], "--batches must be numbers"),
        (["--repeats", "0"], "--repeats must be"),
        (["--speculation", "none"], "--speculation none leaves nothing to compare"),
        (["--save", "/dev/null/x"], "--save /dev/null/x: cannot be made"),
    ],
)
def test_refusals(prompts, options, message):
    result = invoke("tune", "no-such-model", "--prompts", prompts, *options, exit_code=2)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must be a JSON object"),
        ("5", "must be a JSON object"),
        ('{"speculate": 1}', "generate has no option 'speculate': drop it."),
        ('{"model": "m"}', "generate has no option 'model': drop it."),
        ('{"config": "c.json"}', "generate has no option 'config': drop it."),
        ('{"max_tokens": 3.7}', "max_tokens cannot be '3.7'"),
        ('{"max_tokens": "many"}', "max_tokens cannot be 'many'"),
        ('{"max_tokens": true}', "max_tokens must be a text or a number; got True."),
        ('{"max_tokens": [3]}', "max_tokens must be a text or a number; got [3]."),
        ('{"max_tokens": null}', "max_tokens must be a text or a number; got None."),
        ('{"json": 1}', "json must be true or false; got 1."),
        ('{"trace": true}', "trace must be a text or a number; got True."),
        ('{"stop": [3]}', "stop must be a text or a number; got [3]."),
        ('{"seed": 1, "seed": 2}', "names 'seed' twice: drop one."),
        ('{"max_tokens": 1, "max-tokens": 2}', "names 'max-tokens' twice: drop one."),
        ('{"speculation": {"method": "magic"}}', "method must be one of"),
        (None, "cannot read --config"),
    ],
)
def test_bad_config_files(tiny_llama, tmp_path, text, message):
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    result = invoke("generate", tiny_llama, "--prompt", "a", "--config", path, exit_code=2)
    assert message in result.stderr
    assert len([line for line in result.stderr.splitlines() if "KV cache" not in line]) == 1


def test_the_command_line_goes_before_the_file(tiny_llama, tmp_path):
    path = tmp_path / "c.json"
    path.write_text('\ufeff{"max-tokens": 3, "seed": 5, "json": true, "stop": ["x", "y"]}', encoding="utf-8")
    both = invoke("generate", tiny_llama, "--prompt", "a", "--config", path, "--max-tokens", "2", *SHORT[2:6])
    value = json.loads(both.stdout)
    assert len(value["token_ids"]) <= 2
    assert value["seed"] == 5


def trial(length, concurrency, speedup) -> Trial:
    report = {"decode_speedup": speedup, "speedup": speedup}
    return Trial(Setting(length, concurrency), report, 1.0, (), {})


def test_what_is_recommended():
    auto, fixed = trial(None, 1, 1.4), trial(4, 1, 1.42)
    assert recommended([auto, fixed]) == {"control": "auto"}
    assert recommended([auto, fixed, trial(8, 1, 1.5)]) == {"control": "fixed", "num_speculative_tokens": 8}
    assert recommended([trial(None, 1, 0.98), trial(4, 1, 1.01)]) == "none"
    assert best_fixed([auto, fixed, trial(2, 1, 1.1)]).setting.length == 4


def test_where_there_is_nothing_to_gain():
    trials = [trial(None, batch, speedup) for batch, speedup in ((8, 0.99), (1, 1.4), (4, 1.1), (16, 0.98))]
    assert break_even([*trials, trial(4, 1, 0.5)]) == 8
    assert break_even(trials[1:3]) is None
    assert break_even([trial(None, 1, 1.4), trial(None, 2, 0.99), trial(None, 4, 1.6)]) is None
    assert settings([1, 2], [1, 4]) == [Setting(None, 1), Setting(1, 1), Setting(2, 1), Setting(None, 4)]
