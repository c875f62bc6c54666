"""FixedLength, and CostPolicy in simulated time: against plain decoding, and against every fixed length."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from simulation import World, geometric

from paceline.control.acceptance import Acceptance
from paceline.control.asking import Worth
from paceline.control.cost import PassCosts
from paceline.control.guard import Guard
from paceline.control.policy import CostPolicy, FixedLength
from paceline.params import SamplingParams
from paceline.types import Draft, DraftLaw, Load, Observation, RequestView, Verdict

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LOAD = Load(1, 1)


def steep(rows: int) -> float:
    """AVX2: each row costs a sixth of the first one."""
    return 5e-3 + 0.8e-3 * (rows - 1)


def flat(rows: int) -> float:
    """A pass that is bound by reading its weights up to sixteen rows."""
    return 5e-3 + 0.05e-3 * (rows - 1) + 0.5e-3 * max(0, rows - 16)


CURVES = pytest.mark.parametrize("curve", [steep, flat])


def policy(curve=steep, **options) -> CostPolicy:
    return CostPolicy(PassCosts({rows: curve(rows) for rows in ROWS}), **options)


def view(request_id: str = "r") -> RequestView:
    return RequestView(request_id, np.ones(2, np.int32), 1, SamplingParams(), seed=0, stream=0, attempt=0)


def chain(*confidence: float, law: DraftLaw | None = None) -> Draft:
    draft = Draft.chain([1] * len(confidence), source="a", law=law)
    return Draft(draft.token_ids, draft.parents, confidence=np.array(confidence), source="a", law=law)


def test_every_request_drafts_the_same_within_its_limit():
    assert FixedLength(5).plan([], [], LOAD) == []
    assert FixedLength(5).plan([view()] * 4, [0, 3, 5, 9], LOAD) == [0, 3, 5, 5]
    drafts = [chain(0.1), None]
    assert FixedLength(5).select([view()] * 2, drafts, LOAD, seconds=1.0) == drafts


@CURVES
@pytest.mark.parametrize("chance", [0.05, 0.3, 0.6, 0.9])
def test_close_to_the_best_fixed_length(curve, chance):
    """In hindsight: the lengths are fixed for the whole run, and 0 is plain decoding."""

    def seconds_a_token(controller) -> float:
        world = World(curve, geometric(chance), claim=0.7)
        world.run(controller, steps=600)
        return world.seconds / world.num_tokens

    best = min(curve(1), *(seconds_a_token(FixedLength(length)) for length in range(1, 9)))
    assert seconds_a_token(policy(curve)) <= 1.05 * best


@CURVES
@pytest.mark.parametrize(
    ("accepted", "draft_seconds"),
    [
        (lambda step: 0, lambda step: 1e-4),
        (lambda step: 8 if step < 50 else 0, lambda step: 1e-4),
        (lambda step: 8 if step % 100 < 3 else 0, lambda step: 1e-4),
        (lambda step: 8, lambda step: 0.1),
        (lambda step: 8, lambda step: 1e-4 if step < 50 else 0.05),
        (lambda step: 8 if (step // 20) % 2 else 0, lambda step: 1e-3),
    ],
    ids=["always wrong", "wrong after a good start", "rarely right", "slow", "slow after a good start", "moody"],
)
@pytest.mark.parametrize("num_requests", [1, 4])
def test_the_guard_bounds_what_is_lost(curve, accepted, draft_seconds, num_requests):
    world = World(curve, accepted, claim=0.95, draft_seconds=draft_seconds, num_requests=num_requests)
    controller = policy(curve, guard=Guard(budget_seconds=0.05, share=0.02))
    # What nobody can know before it happens; and once may have been a hiccup
    longest = max(draft_seconds(step) for step in range(200))
    for _ in range(1000):
        world.run(controller, steps=1)
        assert world.seconds <= 1.03 * world.plain_seconds + 0.05 + 2 * longest


@CURVES
def test_without_estimates_the_guard_alone_bounds_it(curve):
    """Chances that are never learned from: everything is drafted, always wrong."""

    class Gullible(Acceptance):
        def observe(self, request_id, draft, emitted):
            pass

    world = World(curve, lambda step: 0, claim=0.95)
    world.run(policy(curve, acceptance=Gullible()), steps=3000)
    assert world.seconds <= 1.03 * world.plain_seconds + 0.05


def test_a_noisy_machine_does_not_mislead_it():
    rng = random.Random(1)
    noise = lambda: rng.choice([1.0, 1.0, 1.1, 1.3, 4.0])  # noqa: E731
    noisy, plain = World(steep, geometric(0.8), noise=noise), World(steep, geometric(0.8), noise=noise)
    noisy.run(policy(), steps=2000)
    plain.run(FixedLength(0), steps=2000)
    assert plain.seconds / plain.num_tokens > 1.3 * noisy.seconds / noisy.num_tokens


def test_a_single_stall_does_not_end_drafting():
    world = World(steep, lambda step: 8, draft_seconds=lambda step: 2.0 if step == 50 else 1e-4)
    world.run(policy(), steps=150)
    assert sum(world.lengths[60:]) > 8 * 80


def test_requests_that_do_not_pay_are_tried_together_and_rarely():
    world = World(steep, lambda step: 0, draft_seconds=lambda step: 2e-3, num_requests=4)
    controller = policy()
    world.run(controller, steps=400)
    asked = []
    plan = controller.plan

    def watched(views, limits, load):
        asked.append([budget > 0 for budget in plan(views, limits, load)])
        return [limit if own else 0 for limit, own in zip(limits, asked[-1], strict=True)]

    controller.plan = watched
    world.run(controller, steps=400)
    tries = [own for own in asked if any(own)]
    assert 1 <= len(tries) <= 20
    assert all(all(own) for own in tries)


def test_only_nodes_that_can_pay_are_asked_for():
    """Half of what they must bring where rows are cheapest: nothing where they are free, more the more requests."""
    floors = []
    for curve, sequences in ((flat, 1), (steep, 1), (steep, 16)):
        controller = policy(curve)
        assert controller.plan([view("first")], [8], Load(sequences, sequences)) == [8]
        assert controller.least_reach == 0.0, "tries tell what is behind claims"
        controller._asking.common = Worth(tries=99, gain=1.0, seconds=1e-3)
        assert controller.plan([view()], [8], Load(sequences, sequences)) == [8]
        floors.append(controller.least_reach)
    assert 0 < floors[0] < 0.01
    assert floors[1] == pytest.approx(0.5 * 0.8 / 5)
    assert floors[2] == pytest.approx(0.5 * 0.8 * 16 / 17)


def test_the_price_of_plain_steps_stays_known():
    controller = policy()
    seen = []
    observe = controller.costs.observe
    controller.costs.observe = lambda rows, *rest: seen.append(rows) or observe(rows, *rest)
    World(steep, lambda step: 8).run(controller, steps=300)
    assert seen.count(1) == 1, "of 300 steps one is made plainly"


def plans(controller: CostPolicy, *requests: str, steps: int) -> list[list[int]]:
    """Of steps that take no time."""
    planned = []
    for _ in range(steps):
        planned.append(controller.plan([view(name) for name in requests], [8] * len(requests), LOAD))
        controller.passed(Load(1, 9), 0.0)
    return planned


def test_a_try_that_the_guard_forbids_is_made_up_for():
    controller = policy()
    World(steep, lambda step: 0, draft_seconds=lambda step: 2e-3).run(controller, steps=400)
    controller.guard.allowance = -1.0
    assert plans(controller, "r0", steps=300) == 300 * [[0]]
    controller.guard.allowance = 1.0
    assert controller.plan([view("r0")], [8], LOAD) == [8]


def test_a_try_that_the_guard_allows_in_part_is_one():
    controller = policy()
    World(steep, lambda step: 0, num_requests=4, draft_seconds=lambda step: 2e-3).run(controller, steps=400)
    controller.guard.allowance = 1.5 * controller._asking.worth("r0").seconds
    tries = [limits for limits in plans(controller, "r0", "r1", "r2", "r3", steps=900) if any(limits)]
    assert tries == len(tries) * [[8, 0, 0, 0]]
    assert 1 <= len(tries) <= 40


def test_a_new_request_with_a_prediction_is_tried_at_once_and_others_soon():
    controller = policy()
    World(steep, lambda step: 0, draft_seconds=lambda step: 2e-3).run(controller, steps=2000)
    assert controller._asking.waits > 1
    assert controller.plan([view("r0")], [8], LOAD) == [0]
    assert controller.rest > 0
    both = [view("r0"), replace(view("new"), params=SamplingParams(prediction=(1, 2, 3)))]
    controller.guard.allowance, allowance = -1.0, controller.guard.allowance
    assert controller.plan(both, [8, 8], LOAD) == [0, 0]
    controller.guard.allowance = allowance
    assert controller.plan(both, [8, 8], LOAD) == [8, 8]
    assert controller._asking.waits == 1
    controller.select(both, [None, None], LOAD, seconds=1e-3)
    assert controller.plan(both, [8, 8], LOAD) == [0, 0]


def test_who_pays_does_not_rest_but_waits_for_the_guard():
    controller = policy()
    controller._asking.common = Worth(tries=99, gain=1.0, seconds=1e-3)
    controller.guard.allowance = -1.0
    assert controller.plan([view("r0")], [8], LOAD) == [0]
    assert controller.rest == 0


def test_it_comes_back_when_a_drafter_becomes_good():
    world = World(steep, lambda step: 0 if step < 500 else 8)
    controller = policy()
    world.run(controller, steps=500)
    assert sum(world.lengths[-100:]) < 100
    world.run(controller, steps=200)
    assert sum(world.lengths[-100:]) > 600


def test_costs_that_were_measured_wrongly_are_corrected():
    """Measured while a neighbour was busy: passes over several rows look as cheap as one."""
    world = World(steep, geometric(0.5))
    world.run(CostPolicy(PassCosts(dict.fromkeys(ROWS, 0.005))), steps=3000)
    late = world.lengths[-500:]
    assert sum(late) / len(late) < 2.5


def test_nodes_of_all_requests_compete_for_the_rows():
    kept = policy().select([view("a"), view("b")], [chain(0.9, 0.9, 0.9), chain(0.15, 0.9)], Load(2, 2), seconds=1e-4)
    assert kept[0] is not None
    assert len(kept[0]) == 3
    assert kept[1] is None


def test_a_node_never_comes_without_its_parent():
    tree = Draft(
        np.array([1, 2, 3, 4], np.int32),
        np.array([-1, -1, 1, 2], np.int32),
        confidence=np.array([0.15, 0.6, 0.98, 0.98]),
        source="a",
    )
    [kept] = policy(flat).select([view()], [tree], LOAD, seconds=1e-4)
    assert kept is not None
    assert kept.token_ids.tolist() == [1, 2, 3, 4]
    [kept] = policy().select([view()], [tree], LOAD, seconds=1e-4)
    assert kept is not None
    assert kept.token_ids.tolist() == [2, 3, 4]
    assert kept.parents.tolist() == [-1, 0, 1]


def decode(controller, draft, *, right: bool, load=LOAD, seconds=1e-4, num_computed=0) -> bool:
    """A step of one request; whether it was asked."""
    seen = replace(view(), num_computed=num_computed)
    if not controller.plan([seen], [16], load)[0]:
        controller.passed(load, steep(load.rows) + 1e-6 * num_computed)
        return False
    [kept] = controller.select([seen], [draft], load, seconds=seconds)
    path = tuple(range(len(kept))) if right and kept is not None else ()
    controller.observe(step_of(seen, kept, path, load, num_computed))
    return True


def step_of(seen, draft, path, load, num_computed):
    rows = load.rows + (0 if draft is None else len(draft))
    verdict = Verdict(path, 7, "bonus")
    return Observation([seen], [draft], [verdict], {}, np.zeros(2, np.int32), [None], steep(rows) + 1e-6 * num_computed)


def test_a_drafter_with_a_law_that_is_right_goes_on():
    law = DraftLaw(np.ones((4, 1)), np.array([1]))
    controller = policy()
    asked = [decode(controller, chain(0.5, 0.5, 0.5, 0.5, law=law), right=True) for _ in range(200)]
    assert sum(asked) > 190


def test_a_law_that_is_never_right_is_dropped_whole():
    law = DraftLaw(np.ones((4, 1)), np.array([1]))
    controller = policy()
    for _ in range(100):
        decode(controller, chain(0.5, 0.5, 0.5, 0.5, law=replace(law)), right=False)
    draft = chain(0.9, 0.9, 0.9, 0.9, law=law)
    assert controller.select([view()], [draft], LOAD, seconds=1e-4) == [None]


def test_prompts_in_the_pass_neither_stop_drafting_nor_escape_the_guard():
    with_prompt = Load(1, 200)
    controller = policy()
    for _ in range(600):
        decode(controller, chain(0.9, 0.9), right=True, load=with_prompt)
    assert decode(controller, chain(0.9, 0.9), right=True, load=with_prompt)
    controller = policy()
    slow = [decode(controller, chain(0.9, 0.9), right=False, load=with_prompt, seconds=0.02) for _ in range(40)]
    assert 0.02 * sum(slow) <= 0.05 + 0.02 * (40 * steep(202) + 1)


def test_keys_of_nodes_are_priced_once():
    """A context of 8,000 tokens, where each row's keys cost more than the row itself."""
    costs = PassCosts({rows: steep(rows) for rows in ROWS}, seconds_per_key=1e-7)
    controller = CostPolicy(costs)
    load = Load(1, 1, 8000)
    for _ in range(500):
        seen = replace(view(), num_computed=8000)
        controller.plan([seen], [4], load)
        [kept] = controller.select([seen], [chain(0.9, 0.9, 0.9, 0.9)], load, seconds=1e-4)
        rows = 1 + (0 if kept is None else len(kept))
        step = step_of(seen, kept, tuple(range(rows - 1)), load, 0)
        controller.observe(replace(step, seconds=steep(rows) + 1e-7 * 8000 * rows))
    for rows in (1, 5):
        assert costs.seconds(rows, 8000 * rows) == pytest.approx(steep(rows) + 8e-4 * rows, rel=0.02)


def test_a_step_that_fails_leaves_nothing_behind():
    controller = policy()
    controller.plan([view()], [4], LOAD)
    controller.select([view()], [chain(0.9, 0.9)], LOAD, seconds=1e-4)  # then the pass raises
    controller.plan([], [], LOAD)
    controller.passed(LOAD, 1e-2)
    assert controller.acceptance.reach("r", chain(0.9)) == pytest.approx([0.9])


def test_drafts_with_a_law_stay_whole():
    law = DraftLaw(np.ones((2, 1)), np.array([1]))
    draft = chain(0.01, 0.01, law=law)  # its claims say what was sampled, and are not read
    assert policy().select([view()], [draft], LOAD, seconds=1e-4) == [draft]


def test_what_is_released_is_forgotten():
    world = World(steep, geometric(0.5), num_requests=3)
    controller = policy()
    world.run(controller, steps=20)
    for i in range(3):
        controller._asking.meet(f"r{i}", "slow")
        controller.release(f"r{i}")
    assert not controller._asking._requests
    assert not controller._asking._met
    assert not controller.acceptance._requests
