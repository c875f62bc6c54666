"""Decoding in simulated time: true costs, a drafter that is right as often as a test says, and a controller."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.interfaces import Controller
from paceline.params import SamplingParams
from paceline.types import Draft, Load, Observation, RequestView, Verdict

WRONG, RIGHT = 0, 1  # tokens: the text is 1 1 1 ...


@dataclass
class World:
    """One request, or several in step, with a chain of `length` nodes offered in each step.

    curve: seconds of a pass over some rows. accepted: how many nodes of the chain of a step are right. claim: the
    drafter's confidence. draft_seconds: of a draft. noise: by which a time is multiplied.
    """

    curve: Callable[[int], float]
    accepted: Callable[[int], int]
    claim: float = 0.9
    draft_seconds: Callable[[int], float] = lambda step: 1e-4
    length: int = 8
    num_requests: int = 1
    noise: Callable[[], float] = lambda: 1.0
    seconds: float = field(default=0.0, init=False)
    num_tokens: int = field(default=0, init=False)
    num_steps: int = field(default=0, init=False)
    rest: int = field(default=0, init=False)  # steps to come in which nobody is asked
    lengths: list[int] = field(default_factory=list, init=False)  # nodes verified in each step

    def run(self, controller: Controller, *, steps: int) -> None:
        for _ in range(steps):
            self._step(controller)

    @property
    def plain_seconds(self) -> float:
        """What plain decoding of the same tokens takes, without noise."""
        return self.num_tokens / self.num_requests * self.curve(self.num_requests)

    def _step(self, controller: Controller) -> None:
        views = [
            RequestView(f"r{i}", np.ones(2, np.int32), 1, SamplingParams(), seed=0, stream=0, attempt=0)
            for i in range(self.num_requests)
        ]
        load = Load(self.num_requests, self.num_requests)
        if self.rest:
            self.rest -= 1
            budgets = [0] * len(views)
        else:
            budgets = controller.plan(views, [self.length] * len(views), load)
            self.rest = 0 if any(budgets) else controller.rest
        asked = [i for i, budget in enumerate(budgets) if budget]
        drafts: list[Draft | None] = [None] * len(views)
        if asked:
            right = self.accepted(self.num_steps)
            offered: list[Draft | None] = [self._draft(right, budgets[i]) for i in asked]
            taken = self.draft_seconds(self.num_steps)
            self.seconds += taken
            selected = controller.select([views[i] for i in asked], offered, load, seconds=taken)
            for i, draft in zip(asked, selected, strict=True):
                drafts[i] = draft
        rows = len(views) + sum(len(draft) for draft in drafts if draft is not None)
        taken = self.curve(rows) * self.noise()
        self.seconds += taken
        self.lengths.append(rows - len(views))
        verdicts = [_verdict(draft) for draft in drafts]
        self.num_tokens += sum(1 + len(verdict.path) for verdict in verdicts)
        self.num_steps += 1
        starts = np.zeros(len(views) + 1, np.int32)
        if asked:
            controller.observe(Observation(views, drafts, verdicts, {}, starts, [None] * len(views), taken))
        else:
            controller.passed(load, taken)

    def _draft(self, right: int, budget: int) -> Draft:
        tokens = [RIGHT if node < right else WRONG for node in range(budget)]
        chain = Draft.chain(tokens, source="chain")
        return Draft(chain.token_ids, chain.parents, confidence=np.full(budget, self.claim), source="chain")


def _verdict(draft: Draft | None) -> Verdict:
    tokens: Sequence[int] = [] if draft is None else draft.token_ids.tolist()
    right = next((i for i, token in enumerate(tokens) if token == WRONG), len(tokens))
    return Verdict(tuple(range(right)), RIGHT, "bonus")


def geometric(chance: float, *, seed: int = 0) -> Callable[[int], int]:
    """Each node is right with this chance, once its parent was."""
    rng = random.Random(seed)

    def count(step: int) -> int:
        right = 0
        while right < 64 and rng.random() < chance:
            right += 1
        return right

    return count
