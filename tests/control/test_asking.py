"""Of several drafters the one that takes time is asked where it saves more than that, for as many nodes as do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from paceline.control.asking import Record
from paceline.control.cost import PassCosts
from paceline.control.policy import CostPolicy
from paceline.params import SamplingParams
from paceline.types import Draft, Load, Observation, RequestView, Verdict

PLAIN, ROW = 0.05, 0.002  # seconds of a pass over one row, and of each further one
PER_NODE = 0.004  # of a node of the slow drafter
LIMIT = 8
RIGHT, WRONG = 1, 0


class TwoDrafters:
    """One request; each drafter says, for a step, how many nodes of its chain are right; the first takes no time."""

    def __init__(self, fast: Callable[[int], int], slow: Callable[[int], int], *, per_node: float = PER_NODE) -> None:
        self.fast, self.slow, self.per_node = fast, slow, per_node
        self.policy = CostPolicy(PassCosts({rows: cost(rows) for rows in (1, 2, 4, 8, 16)}))
        self.seconds = 0.0
        self.num_tokens = 0
        self.asked: list[int] = []  # nodes of the slow drafter in each step

    def run(self, steps: int) -> None:
        for step in range(steps):
            self._step(step)

    def _step(self, step: int) -> None:
        view = RequestView("r", np.ones(2, np.int32), 1, SamplingParams(), seed=0, stream=0, attempt=0)
        load, policy = Load(1, 1), self.policy
        [budget] = policy.plan([view], [LIMIT], load)
        draft, count = None, 0
        if budget:
            first = chain(self.fast(step), name="fast")
            assert policy.budgets("fast", [view], [LIMIT], [[]]) == [LIMIT]
            policy.drafted("fast", [first], seconds=1e-5)
            [count] = policy.budgets("slow", [view], [LIMIT], [[first] if first else []])
            second = None
            if count:
                second = chain(min(self.slow(step), count), name="slow", wrong=self.slow(step) < count)
                policy.drafted("slow", [second], seconds=count * self.per_node)
                self.seconds += count * self.per_node
            [draft] = policy.select([view], [longer(first, second)], load, seconds=1e-5 + count * self.per_node)
        self.asked.append(count)
        tokens = [] if draft is None else draft.token_ids.tolist()
        num_right = next((i for i, token in enumerate(tokens) if token == WRONG), len(tokens))
        rows = 1 + len(tokens)
        self.seconds += cost(rows)
        self.num_tokens += 1 + num_right
        verdict = Verdict(tuple(range(num_right)), RIGHT, "bonus")
        policy.observe(Observation([view], [draft], [verdict], {}, np.zeros(2, np.int32), [None], cost(rows)))


def cost(rows: int) -> float:
    return PLAIN + ROW * (rows - 1)


def chain(num_right: int, *, name: str, wrong: bool = False) -> Draft | None:
    tokens = [RIGHT] * num_right + [WRONG] * wrong
    if not tokens:
        return None
    return replace(Draft.chain(tokens, source=name), confidence=np.full(len(tokens), 0.9))


def longer(first: Draft | None, second: Draft | None) -> Draft | None:
    """The merged draft: both are chains of the same text."""
    if first is None and second is None:
        return None
    longest = max((draft for draft in (first, second) if draft is not None), key=len)
    names = [
        tuple(draft.source for draft in (first, second) if draft is not None and node < len(draft))
        for node in range(len(longest))
    ]
    return replace(longest, source="fast+slow", proposers=tuple(names))


def test_asked_only_where_the_other_one_knows_nothing():
    both = TwoDrafters(lambda step: 8 if step % 2 else 0, lambda step: 8)
    both.run(400)
    late = both.asked[200:]
    assert sum(late[1::2]) < 0.1 * sum(late[0::2])
    assert sum(late[0::2]) > 0.8 * LIMIT * len(late[0::2])


def test_one_that_is_always_wrong_is_hardly_asked_and_costs_next_to_nothing():
    world = TwoDrafters(lambda step: 0, lambda step: 0)
    world.run(1000)
    assert world.seconds <= 1.03 * world.num_tokens * PLAIN + 10 * PLAIN


def test_one_that_costs_more_than_it_saves_is_hardly_asked():
    world = TwoDrafters(lambda step: 0, lambda step: 8, per_node=0.06)
    world.run(1000)
    assert world.seconds <= 1.03 * world.num_tokens * PLAIN + 10 * PLAIN
    assert sum(world.asked[500:]) < 10 * LIMIT


@pytest.mark.parametrize("good", [1, 2, 3, 5])
def test_it_is_asked_for_as_many_nodes_as_are_worth_it(good):
    """Its first nodes are right, and what follows never is."""
    world = TwoDrafters(lambda step: 0, lambda step: good)
    world.run(600)
    late = sorted(world.asked[300:])
    assert late[len(late) // 2] == good


def test_a_record_is_judged_by_sums_not_by_single_depths():
    """The first node brings nothing, but without it there is no second one."""
    record = Record()
    for _ in range(20):
        record.note([0.0, 3.0, 0.5])
    assert record.length(3, seconds_per_node=1.0, steps_between_tries=100) == 2
    assert record.length(3, seconds_per_node=2.0, steps_between_tries=100) == 0


def test_new_requests_begin_with_what_is_known_of_others():
    world = TwoDrafters(lambda step: 0, lambda step: 0)
    world.run(300)
    world.policy.release("r")
    before = len(world.asked)
    world.run(20)
    assert sum(world.asked[before:]) <= LIMIT
