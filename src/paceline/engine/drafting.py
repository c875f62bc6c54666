"""The drafting part of a step: the controller's budgets, the drafter's trees, and what both are told of their fate."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

from paceline.cache.manager import CacheManager
from paceline.draft.check import check_draft, check_list
from paceline.engine.scheduler import ScheduledSequence
from paceline.engine.self_test import SelfTest
from paceline.errors import PacelineWarning
from paceline.interfaces import Controller, Drafter
from paceline.types import Draft, Load, Observation, RequestView


class Drafting:
    """Asks an engine's drafter and checks what it answers.

    skip_errors: what the drafter raises, and a draft that is none, costs drafts, not requests: what a server wants,
    where a drafter's author wants the error. Such a step goes on without drafts, and the drafter forgets the requests
    in it, as if they had been preempted, for what it kept of them may be half of something. The errors are counted,
    and the first one is a PacelineWarning.
    """

    def __init__(self, drafter: Drafter, controller: Controller, *, vocab_size: int, chains_only: bool) -> None:
        self.drafter = drafter
        self.controller = controller
        self.skip_errors = False
        self.num_errors = 0
        self.tells = True  # whether the drafter is to be told of this step
        self._vocab_size = vocab_size
        self._chains_only = chains_only
        self._self_test = SelfTest(drafter.name)
        self._load = Load(0, 0)  # of this step
        self._asked = False  # whether anybody is asked in it
        self._rest = 0  # steps to come in which nobody is,
        self._resting: frozenset[str] = frozenset()  # of these sequences
        self._passed: list[tuple[Load, float]] = []  # steps in which nobody was, and their passes' seconds
        drafter.consult(controller)

    def control(self, controller: Controller) -> None:
        """From now on this controller decides."""
        self._rest = 0
        self._tell_of_passed()
        self.controller = controller
        self.drafter.consult(controller)

    def propose(self, plan: list[ScheduledSequence], cache: CacheManager) -> list[Draft | None]:
        """One draft or None for each part. Raises DraftMismatchError, naming the drafter, for what is no draft."""
        drafts: list[Draft | None] = [None] * len(plan)
        load = self._load = _load(plan)
        self._asked, self.tells = False, not self.drafter.catches_up
        indices = [i for i, part in enumerate(plan) if part.draft_limit > 0]
        if self._rest and all(plan[i].sequence.id in self._resting for i in indices):
            self._rest -= 1
            return drafts
        self._rest = 0
        self._tell_of_passed()
        views = [plan[i].view(cache) for i in indices]
        limits = [plan[i].draft_limit for i in indices]
        asked: list[tuple[int, RequestView, int]] = []  # part, view, budget
        planned = self.controller.plan(views, limits, load)
        for i, view, limit, budget in zip(indices, views, limits, planned, strict=True):
            if budget > 0:
                asked.append((i, view, min(limit, int(budget))))
            if not self.controller.fixed or self.drafter.remembers:
                plan[i].sequence.lengths_fixed = False
        if not asked:
            if not self.tells:
                self._rest = self.controller.rest
            self._resting = frozenset(plan[i].sequence.id for i in indices)
            return drafts
        self._asked = self.tells = True
        views = [view for _, view, _ in asked]
        start = time.perf_counter()
        proposals = self._ask(views, [budget for _, _, budget in asked])
        seconds = time.perf_counter() - start
        for index, (i, _, budget) in enumerate(asked):
            draft, sequence = proposals[index], plan[i].sequence
            if draft is None or len(draft) < budget:
                sequence.lengths_fixed = False
            if draft is not None and draft.law is None:
                proposals[index] = draft.cut_after(sequence.ends)
        selected = self.controller.select(views, proposals, load, seconds=seconds)
        for (i, _, _), draft in zip(asked, selected, strict=True):
            drafts[i] = draft if draft is not None and len(draft) else None
        return drafts

    def observe(self, step: Observation) -> None:
        """Tells the drafter of a step, and the controller."""
        self._self_test.note(step.drafts, step.verdicts)
        if self._asked:
            self.controller.observe(step)
        else:
            self.passed(step.drafts, step.seconds)
        try:
            self.drafter.observe(step)
        except Exception as error:
            if not self.skip_errors:
                raise
            self._skip(error, step.views)

    def passed(self, drafts: Sequence[Draft | None], seconds: float) -> None:
        """Notes a step in which nobody was asked: its pass took so long. Not one that verified what a grammar drafted,
        which is not plain."""
        if not any(drafts):
            self._passed.append((self._load, seconds))

    def release(self, sequence_id: str) -> None:
        """The sequence is over or preempted."""
        self._rest = 0
        self._tell_of_passed()
        self.controller.release(sequence_id)
        self._forget(sequence_id)

    def _tell_of_passed(self) -> None:
        for load, seconds in self._passed:
            self.controller.passed(load, seconds)
        self._passed.clear()

    def _ask(self, views: list[RequestView], budgets: list[int]) -> list[Draft | None]:
        name, vocab_size, chains_only = self.drafter.name, self._vocab_size, self._chains_only
        try:
            drafts = self.drafter.propose(list(views), list(budgets))
            check_list(drafts, drafter=name, count=len(views))
            for draft, budget in zip(drafts, budgets, strict=True):
                if draft is not None:
                    check_draft(draft, drafter=name, budget=budget, vocab_size=vocab_size, chains_only=chains_only)
            return list(drafts)
        except Exception as error:
            if not self.skip_errors:
                raise
            self._skip(error, views)
        return [None] * len(views)

    def _forget(self, sequence_id: str) -> None:
        try:
            self.drafter.release(sequence_id)
        except Exception as error:
            if not self.skip_errors:
                raise
            self._skip(error, ())

    def _skip(self, error: Exception, views: Sequence[RequestView]) -> None:
        """Counts an error; the drafter forgets these requests."""
        self.num_errors += 1
        if self.num_errors == 1:
            warnings.warn(
                f"drafter {self.drafter.name!r} failed ({type(error).__name__}: {error}): its drafts of such steps are "
                "left out, and later errors only counted.",
                PacelineWarning,
                stacklevel=2,
            )
        for view in views:
            self._forget(view.request_id)


def _load(plan: list[ScheduledSequence]) -> Load:
    sequences = rows = keys = 0
    for part in plan:
        rows += part.num_tokens
        if part.samples:
            sequences += 1
            keys += part.sequence.num_computed
    return Load(sequences, rows, keys)
