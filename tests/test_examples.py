"""examples/ runs, and its drafters leave the text alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline import SamplingParams
from toy_engine import PROMPT, make_engine, run

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_plug_in_runs_as_it_says(tiny_llama) -> None:
    command = [sys.executable, EXAMPLES / "plugin_drafter.py", tiny_llama, "ab ab ab ab"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "'paceline:spec_decode_num_draft_tokens_per_drafter_total{drafter=\"last_follower\"}'" in result.stdout


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_plug_in_leaves_the_text_alone(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from plugin_drafter import LastFollower

    params = SamplingParams(temperature=temperature, seed=2, max_tokens=40, ignore_eos=True)
    prompts = [PROMPT, PROMPT[:4]]
    plain = run(make_engine(), prompts, params)
    drafted = run(make_engine(drafter=LastFollower(max_length=3)), prompts, params)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert sum(output.metrics.num_accepted_tokens for output in drafted) > 0
