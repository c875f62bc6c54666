"""SelfTest: who is warned of a drafter that is never right, when, and who is not."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from paceline.engine.self_test import SelfTest
from paceline.errors import PacelineWarning
from paceline.params import SamplingParams
from paceline.types import Draft, Verdict
from toy_engine import PROMPT, make_engine, oracle, run

PARAMS = SamplingParams(max_tokens=90, ignore_eos=True)


def warned(accepted: list[int], draft: Draft, *, num_requests: int = 1) -> list[str]:
    """The warnings of steps in which each request's draft was accepted so far."""
    test = SelfTest("guess")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for num_accepted in accepted:
            verdict = Verdict(tuple(range(num_accepted)), 0, "recovered")
            test.note([None, draft], [verdict, None])  # a plain request, and a prompt that is not through: no matter
            test.note([draft] * num_requests, [verdict] * num_requests)
    assert all(warning.category is PacelineWarning for warning in caught)
    return [str(warning.message) for warning in caught]


CHAIN = Draft.chain([1, 2, 3, 4, 5], source="guess")
BUSH = Draft(np.arange(60, dtype=np.int32), np.full(60, -1, np.int32), source="guess")  # one of 60 can be right


def test_a_drafter_that_is_never_right_is_reported_once() -> None:
    assert warned([0] * 31, CHAIN) == []
    [message] = warned([0] * 200, CHAIN)
    assert message.startswith("over the first 32 steps with drafts 'guess' had 0 of 160 tokens accepted, ")
    assert "speculation none" in message


def test_steps_count_and_not_the_drafts_of_all_requests() -> None:
    assert warned([0] * 31, CHAIN, num_requests=8) == []
    [message] = warned([0] * 32, CHAIN, num_requests=8)
    assert "0 of 1280 tokens" in message


def test_the_limit_is_two_percent() -> None:
    assert len(warned([1, 1, 1] + [0] * 29, CHAIN)) == 1  # 3 of 160
    assert warned([1, 1, 1, 1] + [0] * 29, CHAIN) == []  # 4 of 160


def test_a_wide_tree_is_not_blamed_for_its_siblings() -> None:
    assert warned([1] + [0] * 31, BUSH) == []  # 1 of 32, though 1 of 1920 nodes
    assert len(warned([0] * 32, BUSH)) == 1


def test_an_engine_warns_while_it_goes_on() -> None:
    plain = run(make_engine(), [PROMPT], PARAMS)[0]
    answer = [*PROMPT, *plain.token_ids]
    engine = make_engine(oracle(answer, wrong_at=frozenset(range(len(answer)))))
    with pytest.warns(PacelineWarning, match="steps with drafts 'scripted' had 0 of") as caught:
        output = run(engine, [PROMPT], PARAMS)[0]
    assert len(caught) == 1
    assert output.token_ids == plain.token_ids
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(make_engine(oracle(answer)), [PROMPT], PARAMS)
