"""Who is told of which steps, and when no plan is made."""

from __future__ import annotations

from dataclasses import replace

from paceline.control.policy import FixedLength
from paceline.engine.drafting import Drafting
from paceline.interfaces import Drafter
from paceline.params import SamplingParams
from paceline.types import Draft
from toy_engine import PROMPT, make_engine

STEPS = 30  # the prompt's, and one for each further token


class Told(Drafter):
    """Notes of which texts, by their lengths, it is asked and told, and drafts nothing."""

    name = "told"
    num_successors = 2

    def __init__(self, *, catches_up: bool) -> None:
        self.catches_up = catches_up
        self.asked: list[int] = []
        self.told: list[int] = []

    def propose(self, views, budgets):
        self.asked += [len(view.token_ids) for view in views]
        return [None] * len(views)

    def observe(self, step):
        assert [rows.shape for rows in step.successors] == [(1, 2)] * len(step.views)
        self.told += [len(view.token_ids) for view in step.views]


class Controller(FixedLength):
    """Plans drafts in some of the steps that it plans, and wants a rest after one of the others."""

    fixed = False

    def __init__(self, *asks: int, rests: dict[int, int]) -> None:
        super().__init__(4)
        self._asks, self._rests = asks, rests
        self.num_plans = 0
        self.told: list[str] = []

    def plan(self, views, limits, load):
        self.rest = self._rests.get(self.num_plans, 0)
        asks = self.num_plans in self._asks
        self.num_plans += 1
        self.told.append("plan")
        return [limit * asks for limit in limits]

    def observe(self, step):
        self.told.append("drafted")

    def passed(self, load, seconds):
        assert load.num_sequences >= 1
        assert seconds > 0
        self.told.append("passed")


def decode(drafter: Drafter, controller: Controller) -> None:
    engine = make_engine(drafter=drafter)
    assert engine.drafting is not None
    engine.drafting.control(controller)
    engine.add_request(PROMPT, SamplingParams(max_tokens=STEPS, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()


def test_in_a_rest_no_plan_is_made_and_who_catches_up_is_told_of_drafts_alone():
    drafter, controller = Told(catches_up=True), Controller(2, 3, rests={1: 7})
    decode(drafter, controller)
    texts = range(len(PROMPT), len(PROMPT) + STEPS)
    assert drafter.asked == drafter.told == [texts[9], texts[10]]
    first = ["plan", "passed", "plan", *(8 * ["passed"]), "plan", "drafted", "plan", "drafted"]
    assert controller.told == [*first, *(19 * ["plan", "passed"])]


def test_who_does_not_catch_up_is_told_of_every_step_and_knows_no_rest():
    drafter, controller = Told(catches_up=False), Controller(2, rests={1: 7})
    decode(drafter, controller)
    assert drafter.told == list(range(len(PROMPT), len(PROMPT) + STEPS))
    assert controller.num_plans == STEPS
    assert controller.told.count("passed") == STEPS - 1


def test_who_comes_or_goes_ends_the_rest():
    controller = Controller(rests={1: 99, 2: 99, 3: 99})
    engine = make_engine(drafter=Told(catches_up=True))
    assert engine.drafting is not None
    engine.drafting.control(controller)
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True)

    def steps(count: int) -> int:
        """Plans made in them."""
        before = controller.num_plans
        for _ in range(count):
            engine.step()
        return controller.num_plans - before

    engine.add_request(PROMPT, params)
    assert steps(5) == 2, "for its prompt, where nothing can be drafted, and for its first step"
    engine.add_request(PROMPT, replace(params, speculation=False))
    assert steps(5) == 0, "it would not be asked"
    second = engine.add_request(PROMPT, params)
    assert steps(5) == 1
    engine.abort(second)
    assert steps(1) == 1


def test_a_rest_that_was_broken_is_over():
    controller = Controller(2, rests={1: 99})
    drafter = Told(catches_up=True)
    engine = make_engine(drafter=drafter)
    assert engine.drafting is not None
    engine.drafting.control(controller)
    engine.add_request(PROMPT, SamplingParams(max_tokens=STEPS, ignore_eos=True))
    for _ in range(5):
        engine.step()
    assert controller.num_plans == 2
    engine.add_request(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()  # computes its prompt
    engine.step()
    assert controller.told[-2:] == ["plan", "drafted"]
    engine.step()  # its last one, in which the other alone may be drafted for
    assert controller.num_plans == 4


def test_a_pass_with_what_a_grammar_drafted_is_no_plain_one():
    controller = Controller(rests={})
    drafting = Drafting(Told(catches_up=True), controller, vocab_size=9, chains_only=False)
    drafting.passed([Draft.chain([1, 2], source="grammar"), None], 1.0)
    drafting.control(Controller(rests={}))
    assert controller.told == []


def test_another_controller_ends_the_rest():
    engine = make_engine(drafter=Told(catches_up=True))
    assert engine.drafting is not None
    before, after = Controller(rests={0: 99}), Controller(0, rests={})
    engine.drafting.control(before)
    engine.add_request(PROMPT, SamplingParams(max_tokens=STEPS, ignore_eos=True))
    engine.step()
    engine.drafting.control(after)
    engine.step()
    assert before.told == ["plan", "passed"]
    assert after.told == ["plan", "drafted"]
