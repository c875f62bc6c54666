"""What a forecast counts."""

from __future__ import annotations

import pytest

from paceline import SamplingParams
from paceline.bench.tuning import Forecast
from paceline.control.cost import PassCosts
from paceline.control.policy import FixedLength
from paceline.types import Load
from toy_engine import PROMPT, make_engine, oracle, run


def test_passes_of_decoding_are_foretold_and_those_with_prompts_taken_as_they_were():
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    [output] = run(make_engine(), [PROMPT], params)
    engine = make_engine(oracle([*PROMPT, *output.token_ids]))
    assert engine.drafting is not None
    forecast = Forecast(FixedLength(4), PassCosts({1: 1.0, 5: 1.0}))
    engine.drafting.control(forecast)
    run(engine, [PROMPT], params)
    # The first token comes of the prompt's pass, and each pass yields five where all drafts are right and cost nothing.
    assert forecast.speedup == pytest.approx(24 / 5, rel=0.01)
    assert forecast.plain_seconds == pytest.approx(24, rel=0.01)
    assert 0 < forecast.prompt_seconds < 1
    before = forecast.prompt_seconds
    forecast.passed(Load(0, 30), 19 - before)
    assert forecast.throughput_speedup == pytest.approx((24 + 19) / (5 + 19), rel=0.01)
    forecast.passed(Load(1, 1), 99.0)
    assert forecast.speedup == pytest.approx(25 / 6, rel=0.01)
