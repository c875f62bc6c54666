"""Steps and drafters that fail at random: only the requests of a failed step are lost, and nothing else shows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_scenarios import Arrival, Scenario, Setting, any_params, any_setting, arrivals
from paceline.errors import PacelineWarning
from paceline.interfaces import Drafter
from paceline.params import SamplingParams
from paceline.types import Draft
from toy_engine import PROMPT, TOKENIZER, make_engine, oracle, run


class BrokenError(RuntimeError):
    pass


class FailingScenario(Scenario):
    """A Scenario whose runner, drafter and verifier raise now and then; what a failed step loses is noted."""

    def __init__(self, setting: Setting, plan: list[Arrival], *, seed: int) -> None:
        super().__init__(setting, plan, rule="coupled")
        self.rng = random.Random(seed)
        self.lost: set[str] = set()
        engine = self.engine
        self.make_fail(engine.runner, "forward", odds=0.05)
        self.make_fail(engine.runner, "move", odds=0.05)
        self.make_fail(engine.verifier, "verify", odds=0.02)
        if engine.drafter is not None:
            for name in ("propose", "observe", "release"):
                self.make_fail(engine.drafter, name, odds=0.1)
            assert engine.drafting is not None
            engine.drafting.skip_errors = True

    def make_fail(self, owner: Any, name: str, *, odds: float) -> None:
        call = getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            if self.rng.random() < odds / 2:
                raise BrokenError(f"before {name}")
            result = call(*args, **kwargs)
            if self.rng.random() < odds / 2:
                raise BrokenError(f"after {name}")
            return result

        setattr(owner, name, failing)

    def step(self) -> None:
        try:
            super().step()
        except BrokenError:
            for request_id in self.engine.in_step:
                self.engine.discard(request_id)
                self.lost.add(request_id)

    def check_end(self) -> None:
        kept = [index for index in range(len(self.plan)) if self.ids[index] not in self.lost - self.outputs.keys()]
        self.ids = {place: self.ids[index] for place, index in enumerate(kept)}
        self.plan = [self.plan[index] for index in kept]
        super().check_end()


@pytest.mark.filterwarnings("ignore::paceline.errors.PacelineWarning")
@settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    any_setting(("none", "right", "tree", "mixed", "suffix", "recycle", "draft_model", "layer_skip", "hybrid")),
    arrivals(any_params()),
    st.integers(0, 1000),
)
def test_failures_cost_the_requests_of_their_step_and_nothing_else(setting, plan, seed) -> None:
    scenario = FailingScenario(setting, plan, seed=seed)
    scenario.run()
    scenario.check_end()
    scenario.check_equal_to_plain()


class Faulty(Drafter):
    """Drafts the coming tokens, until it does something else."""

    name = "faulty"

    def __init__(self, script, fault) -> None:
        self.script = script
        self.fault = fault
        self.num_calls = 0

    def propose(self, views, budgets):
        self.num_calls += 1
        if self.num_calls > 1:
            return self.fault(views)
        return [
            Draft.chain(self.script(view)[:budget], source="x") for view, budget in zip(views, budgets, strict=True)
        ]


def raising(views):
    raise BrokenError("no draft today")


@pytest.mark.parametrize(
    "fault",
    [
        raising,
        lambda views: None,
        lambda views: [None] * (len(views) + 1),
        lambda views: ["draft"] * len(views),
        lambda views: [Draft.chain([TOKENIZER.vocab_size], source="x")] * len(views),
    ],
)
def test_where_errors_are_skipped_a_drafter_costs_drafts_and_is_reported_once(fault) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = run(make_engine(), [PROMPT], params)[0]
    engine = make_engine(drafter=Faulty(oracle([*PROMPT, *plain.token_ids]), fault))
    assert engine.drafting is not None
    engine.drafting.skip_errors = True
    with pytest.warns(PacelineWarning, match="drafter 'faulty' failed") as warned:
        output = run(engine, [PROMPT], params)[0]
    assert len(warned) == 1
    assert engine.drafting.num_errors > 1
    assert output.metrics.num_drafts == 1
    assert output.metrics.num_accepted_tokens == 4
    assert replace(output.outputs[0], origins=()) == replace(plain.outputs[0], origins=())


def test_a_drafter_may_change_what_it_is_given() -> None:
    class Vandal(Drafter):
        name = "vandal"

        def propose(self, views, budgets):
            drafts = [None] * len(views)
            views.clear()
            budgets.clear()
            return drafts

    params = SamplingParams(max_tokens=12, ignore_eos=True)
    assert (
        run(make_engine(drafter=Vandal()), [PROMPT], params)[0].token_ids
        == run(make_engine(), [PROMPT], params)[0].token_ids
    )


def test_an_engine_that_cannot_plan_loses_all_its_requests() -> None:
    engine = make_engine()
    ids = [engine.add_request(PROMPT, SamplingParams(n=2)) for _ in range(3)]
    engine.step()
    assert engine.in_step == ids[:2]  # 32 tokens are two prompts
    engine.scheduler.schedule = lambda: raising([])  # type: ignore[method-assign]
    with pytest.raises(BrokenError):
        engine.step()
    assert engine.in_step == ids
    for request_id in [*ids, "unknown"]:
        engine.discard(request_id)
    engine.check_integrity()
    assert not engine.has_unfinished
    assert engine.cache.num_free_blocks == engine.cache.num_blocks
