"""Of several drafters the one that takes time is asked where it saves more than that, for as many nodes as do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from paceline.control.asking import Asking, Lengths, Stopwatch
from paceline.control.cost import PassCosts
from paceline.control.policy import CostPolicy
from paceline.interfaces import Drafter
from paceline.params import SamplingParams
from paceline.types import Draft, Load, Observation, RequestView, Verdict

PLAIN, ROW = 0.05, 0.002  # seconds of a pass over one row, and of each further one
PER_NODE = 0.004  # of a node of the slow drafter
LIMIT = 8
RIGHT, WRONG = 1, 0


class Named(Drafter):
    """Only asked about."""

    def __init__(self, name: str, *, serial: bool) -> None:
        self.name, self.serial = name, serial

    def propose(self, views, budgets):
        return [None] * len(views)


FAST, SLOW, SLOW_TOO = Named("fast", serial=False), Named("slow", serial=True), Named("slow too", serial=True)
Answer = Callable[[int], int]  # nodes of a chain that are right, by the step


class World:
    """One request at a time; each drafter says how many nodes of its chain are right. The fast one takes no time."""

    def __init__(self, fast: Answer, *slow: Answer, per_node: float = PER_NODE) -> None:
        self.answers = dict(zip((FAST, SLOW, SLOW_TOO), (fast, *slow), strict=False))
        self.per_node = per_node
        self.policy = CostPolicy(PassCosts({rows: cost(rows) for rows in (1, 2, 4, 8, 16)}))
        self.seconds = 0.0
        self.num_tokens = 0
        self.asked: list[int] = []  # nodes of slow drafters in each step
        self.planned: list[int] = []

    def run(self, steps: int, *, request_id: str = "r") -> None:
        for step in range(steps):
            self._step(step, request_id)

    @property
    def plain_seconds(self) -> float:
        return self.num_tokens * PLAIN

    def _step(self, step: int, request_id: str) -> None:
        view = RequestView(request_id, np.ones(2, np.int32), 1, SamplingParams(), seed=0, stream=0, attempt=0)
        load, policy = Load(1, 1), self.policy
        [budget] = policy.plan([view], [LIMIT], load)
        draft, num_slow, taken = None, 0, 0.0
        drafts: list[Draft] = []
        if budget:
            for drafter, answer in self.answers.items():
                [count] = policy.budgets(drafter, [view], [LIMIT], [list(drafts)])
                if not count:
                    continue
                num_right = answer(step)
                wrong = max(0, count - num_right) if drafter.serial else 0
                own = chain(min(num_right, count), name=drafter.name, wrong=wrong)
                seconds = count * self.per_node if drafter.serial else 1e-4
                policy.drafted(drafter, [view], [own], seconds=seconds)
                taken += seconds
                num_slow += count * drafter.serial
                drafts += [] if own is None else [own]
            [draft] = policy.select([view], [longest(drafts)], load, seconds=taken)
        self.planned.append(budget)
        self.asked.append(num_slow)
        tokens = [] if draft is None else draft.token_ids.tolist()
        num_right = next((i for i, token in enumerate(tokens) if token == WRONG), len(tokens))
        rows = 1 + len(tokens)
        self.seconds += cost(rows) + taken
        self.num_tokens += 1 + num_right
        verdict = Verdict(tuple(range(num_right)), RIGHT, "bonus")
        if budget:
            policy.observe(Observation([view], [draft], [verdict], {}, np.zeros(2, np.int32), [None], cost(rows)))
        else:
            policy.passed(load, cost(rows))


def cost(rows: int) -> float:
    return PLAIN + ROW * (rows - 1)


def chain(num_right: int, *, name: str, wrong: int) -> Draft | None:
    tokens = [RIGHT] * num_right + [WRONG] * wrong
    if not tokens:
        return None
    return replace(Draft.chain(tokens, source=name), confidence=np.full(len(tokens), 0.9))


def longest(drafts: list[Draft]) -> Draft | None:
    """The merged draft: all are chains of the same text."""
    if not drafts:
        return None
    merged = max(drafts, key=len)
    names = [tuple(draft.source for draft in drafts if node < len(draft)) for node in range(len(merged))]
    return replace(merged, source="hybrid", proposers=tuple(names))


def test_asked_only_where_the_other_one_knows_nothing():
    both = World(lambda step: 8 if step % 2 else 0, lambda step: 8)
    both.run(400)
    late = both.asked[200:]
    assert sum(late[1::2]) < 0.1 * sum(late[0::2])
    assert sum(late[0::2]) > 0.8 * LIMIT * len(late[0::2])


def test_one_that_is_always_wrong_is_hardly_asked_and_costs_next_to_nothing():
    world = World(lambda step: 0, lambda step: 0)
    world.run(1000)
    assert world.seconds <= 1.03 * world.plain_seconds + 10 * PLAIN


def test_one_that_costs_more_than_it_saves_is_hardly_asked():
    world = World(lambda step: 0, lambda step: 8, per_node=0.06)
    world.run(1000)
    assert world.seconds <= 1.03 * world.plain_seconds + 10 * PLAIN
    assert sum(world.asked[500:]) < 10 * LIMIT


@pytest.mark.parametrize("good", [1, 2, 3, 5])
def test_it_is_asked_for_as_many_nodes_as_are_worth_it(good):
    """Its first nodes are right, and what follows never is."""
    world = World(lambda step: 0, lambda step: good)
    world.run(600)
    late = sorted(world.asked[300:])
    assert late[len(late) // 2] == good


def test_a_slow_one_that_loses_does_not_stop_the_others():
    world = World(lambda step: 3, lambda step: 0, per_node=0.02)
    world.run(300)
    assert sum(map(bool, world.planned[50:])) > 240  # all but the plain steps that keep the price known
    assert sum(world.asked[100:]) < 4 * LIMIT


def test_where_two_slow_ones_agree_one_of_them_is_asked():
    world = World(lambda step: 0, lambda step: 8, lambda step: 8)
    world.run(400)
    late = world.asked[200:]
    assert 0.8 * LIMIT * len(late) < sum(late) < 1.3 * LIMIT * len(late)


def test_one_that_becomes_good_is_found_by_short_requests_too():
    world = World(lambda step: 0, lambda step: 0)
    world.run(300)
    world.answers[SLOW] = lambda step: 8
    for number in range(100):
        world.run(20, request_id=f"short {number}")
        world.policy.release(f"short {number}")
    assert sum(world.asked[-400:]) > 0.5 * 400 * LIMIT


def test_requests_begin_with_what_is_known_of_others():
    world = World(lambda step: 0, lambda step: 0)
    world.run(300)
    world.policy.release("r")
    before = len(world.asked)
    world.run(20, request_id="another")
    assert sum(world.asked[before:]) <= LIMIT


def test_lengths_are_judged_by_sums_not_by_single_depths():
    """The first node brings nothing, but without it there is no second one."""
    lengths = Lengths()
    for _ in range(20):
        lengths.note([0.0, 3.0, 0.5])
    assert lengths.best(3, 1.0) == 2
    assert lengths.best(3, 2.0) == 0


def test_a_stall_is_no_price():
    watch = Stopwatch(usual=1.0)
    assert watch.counted(2e-3, 2) == 2e-3
    assert watch.counted(5.0, 2) == pytest.approx(8e-3)
    assert watch.counted(5.0, 2) > 1.0  # twice is no accident
    assert Stopwatch(usual=1.0).counted(0.5, 1) == 0.5


def test_what_is_released_is_forgotten():
    world = World(lambda step: 1, lambda step: 2)
    world.run(30)
    world.policy.release("r")
    assert not world.policy._asking._requests
    assert not world.policy._asking._lengths


def test_tries_in_vain_come_at_longer_intervals_until_one_pays():
    asking = Asking()
    waits = []
    for _ in range(40):
        asking.asked(0.0, 1.0)
        waits.append(asking.waits)
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (1, 4)
    asking.asked(2.0, 1.0)
    assert asking.waits == 1


def test_a_rest_ends_when_it_is_time_to_try():
    asking = Asking()
    for _ in range(99):
        asking.asked(0.0, 1.0)
    asking.tried()
    asking.step_over()
    assert not asking.is_time_to_try(10)
    for _ in range(1 + asking.rest(10)):
        assert not asking.is_time_to_try(10)
        asking.step_over()
    assert asking.is_time_to_try(10)
