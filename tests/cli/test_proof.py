"""`paceline verify --proof`, and rules of which it compares the law: what holds, and what is found when it does not."""

from __future__ import annotations

import html
import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.engine.engine import Engine
from paceline.verify.rejection import RejectionVerifier

SHORT = ("--max-tokens", "12", "--kv-cache-memory", "4M", "--threads", "1", "--seed", "3")
FEW = ("--samples", "200")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"id": f"chat-{i}", "category": "chat", "turns": [f"{i} ab ab ab ab ab"]} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def invoke(*args, exit_code=0):
    result = CliRunner().invoke(app, ["verify", *map(str, args)])
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_a_proof_is_a_page_on_which_all_holds(tiny_llama, prompts, tmp_path, rule):
    page = tmp_path / "proof.html"
    drafter = json.dumps({"method": "ngram", "min_ngram": 1, "verification": rule})
    value = json.loads(
        invoke(
            tiny_llama,
            "--prompts",
            prompts,
            *SHORT,
            *(() if rule == "coupled" else FEW),
            "--speculation",
            drafter,
            "--proof",
            page,
            "--json",
        ).stdout
    )
    assert all(check["holds"] for check in value["checks"]), value
    assert len(value["checks"]) == (6 if rule == "coupled" else 5)
    assert (value["prompts"], value["identical"], value["divergences"]) == (3, 3, [])
    assert value["lossless"] is True
    text = page.read_text(encoding="utf-8")
    assert "All checks hold." in text
    assert "FAILS" not in text
    assert all(html.escape(check["name"]) in text for check in value["checks"])


def test_a_law_is_compared_where_ids_cannot_be(tiny_llama, prompts):
    rule = '{"method": "ngram", "min_ngram": 1, "verification": "rejection"}'
    result = invoke(tiny_llama, "--prompts", prompts, *SHORT, *FEW, "--temperature", "1", "--speculation", rule)
    assert result.stdout.startswith("holds: same law as plain decoding, temperature 1: ")
    again = invoke(
        tiny_llama, "--prompts", prompts, *SHORT, *FEW, "--temperature", "1", "--speculation", rule, "--json"
    )
    value = json.loads(again.stdout)
    assert (value["prompts"], value["identical"], value["divergences"]) == (3, None, [])


def test_what_nobody_drafted_for_is_not_called_proved(tiny_llama, prompts):
    never = '{"method": "ngram", "min_ngram": 60, "max_ngram": 64, "verification": "rejection"}'
    result = invoke(tiny_llama, "--prompts", prompts, *SHORT, *FEW, "--temperature", "1", "--speculation", never)
    assert result.stdout.startswith("untested: same law as plain decoding")


def test_a_rule_that_accepts_too_much_is_found(tiny_llama, prompts, monkeypatch):
    monkeypatch.setattr(RejectionVerifier, "coins", lambda *_, count, **__: np.full(count, 1e-12))
    rule = '{"method": "ngram", "min_ngram": 1, "verification": "rejection"}'
    options = (*FEW, "--temperature", "1", "--speculation", rule)
    result = invoke(tiny_llama, "--prompts", prompts, *SHORT, *options, exit_code=1)
    assert result.stdout.startswith("FAILS: same law")


def test_two_runs_that_are_wrong_in_the_same_way_are_found(tiny_llama, prompts, tmp_path, monkeypatch):
    """Plain decoding itself emits wrong tokens: only feeding the output to the target shows it."""
    right = Engine._compute

    def wrong(self, batch, sampling):
        output = right(self, batch, sampling)
        ids = output.token_ids
        return replace(output, token_ids=None if ids is None else np.maximum(ids - 1, 0))

    monkeypatch.setattr(Engine, "_compute", wrong)
    options = ("--speculation", "ngram", "--proof", tmp_path / "proof.html")
    result = invoke(tiny_llama, "--prompts", prompts, *SHORT, *options, exit_code=1)
    assert "FAILS: each token is the target's own choice, greedy" in result.stdout
    assert "At least one check fails." in (tmp_path / "proof.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--samples", "5"), "--samples must be 20 to 1000; got 5"),
        (("--samples", "50", "--temperature", "1"), "--samples is for the rules rejection and block"),
        (("--proof", "no/such/folder/x.html"), "there is no such folder"),
    ],
)
def test_what_cannot_be_is_refused(prompts, options, words):
    assert words in invoke("never loaded", "--prompts", prompts, *options, exit_code=2).stderr
