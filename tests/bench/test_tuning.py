"""What a forecast counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline import SamplingParams
from paceline.bench.tuning import Forecast
from paceline.control.cost import PassCosts
from paceline.control.policy import FixedLength
from toy_engine import PROMPT, make_engine, oracle, run


def test_plain_runs_beside_the_drafted_ones_are_not_foretold():
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    plain = replace(params, speculation=False)
    [output] = run(make_engine(), [PROMPT], params)
    engine = make_engine(oracle([*PROMPT, *output.token_ids]))
    assert engine.drafting is not None
    forecast = Forecast(FixedLength(4), PassCosts({1: 1.0, 5: 1.0}))
    engine.drafting.control(forecast)
    for each in (plain, params, plain):
        run(engine, [PROMPT], each)
    # The first token comes of the prompt's pass, and each pass yields five where all drafts are right and cost nothing.
    assert forecast.speedup == pytest.approx(24 / 5, rel=0.01)
    assert forecast.plain_seconds == pytest.approx(24, rel=0.01)
