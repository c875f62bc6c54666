"""Who computes what in the next step: first come, first served, without phases.

Prefill, chunked prefill, decoding and recomputing after a preemption are one thing: computing pending tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from paceline.cache.manager import CacheManager
from paceline.config import SchedulerConfig
from paceline.engine.request import Sequence
from paceline.errors import CacheError
from paceline.types import Draft, RequestView


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part of a step."""

    sequence: Sequence
    num_tokens: int  # pending tokens to compute
    samples: bool  # all pending tokens are computed, so that the pass yields a new one
    draft_limit: int = 0  # nodes that may be drafted on top
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, destination) blocks to copy before writing
    allowed: np.ndarray | None = None  # [1 + nodes, ceil(V/8)] uint8, bit masks of its rows, if it has a grammar
    _view: RequestView | None = None

    def view(self, cache: CacheManager) -> RequestView:
        """What a drafter may know of the sequence, as it was before the step."""
        if self._view is None:
            self._view = self.sequence.view(cache.block_table(self.sequence.id))
        return self._view

    def constrain(self, draft: Draft | None) -> Draft | None:
        """The draft as far as the sequence's grammar allows; sets the rows' masks."""
        grammar = self.sequence.grammar
        if grammar is not None and self.samples:
            draft, self.allowed = grammar.constrain(draft, limit=self.draft_limit)
        return draft


class Scheduler:
    """Keeps the waiting and the running sequences and allots tokens and K/V blocks to them."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheManager, *, max_model_len: int, max_draft_tokens: int
    ) -> None:
        self.config = config
        self.cache = cache
        self.max_model_len = max_model_len
        self.max_draft_tokens = max_draft_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence is finished or cancelled: its blocks are free again. Unknown ones are ignored."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.cache.free(sequence.id)

    def schedule(self) -> tuple[list[ScheduledSequence], list[Sequence]]:
        """The next step's parts, and the sequences that were preempted to make room for them."""
        plan: dict[str, ScheduledSequence] = {}
        preempted: list[Sequence] = []
        budget = self.config.max_num_batched_tokens
        # Decoding sequences before long prompts, so that no prompt starves them; oldest first within each.
        for sequence in sorted(self.running, key=lambda s: s.pending > 1):
            if budget and sequence not in preempted:
                budget -= self._compute(sequence, budget, plan, preempted)
        going_on = list(plan.values())
        while self.waiting and budget and not preempted and len(self.running) < self.config.max_num_seqs:
            admitted = self._admit(self.waiting[0], budget)
            if admitted is None:
                break
            plan[admitted.sequence.id] = admitted
            budget -= admitted.num_tokens
        for part in going_on:
            budget -= self._allow_drafts(part, budget)
        if not plan and self.waiting and not self.running:
            raise CacheError(
                f"{self.cache.num_blocks} KV blocks of {self.cache.block_size} tokens hold not even one request. "
                "Raise kv_cache_memory or lower max_model_len."
            )
        return list(plan.values()), preempted

    def roll_back(self, plan: list[ScheduledSequence]) -> None:
        """Frees what a step reserved and did not keep; full blocks become findable by their prefix."""
        for part in plan:
            sequence = part.sequence
            if sequence.finish_reason is None:
                self.cache.commit(sequence.id, sequence.tokens.view(), sequence.num_computed)

    def _compute(
        self, sequence: Sequence, budget: int, plan: dict[str, ScheduledSequence], preempted: list[Sequence]
    ) -> int:
        """Schedules pending tokens, preempting the youngest while blocks are lacking. Returns the budget used."""
        num_tokens = min(sequence.pending, budget)
        given_back = 0
        while True:
            copies = self.cache.allocate(sequence.id, num_computed=sequence.num_computed, num_new=num_tokens)
            if copies is not None:
                plan[sequence.id] = _part(sequence, num_tokens, copies)
                return num_tokens - given_back
            youngest = self.running[-1]
            self._preempt(youngest)
            preempted.append(youngest)
            dropped = plan.pop(youngest.id, None)
            given_back += dropped.num_tokens if dropped else 0
            if youngest is sequence:
                return -given_back

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.cache.free(sequence.id)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _allow_drafts(self, part: ScheduledSequence, budget: int) -> int:
        """Reserves rows and blocks for a draft, as far as nobody else needs them. Returns the rows taken."""
        sequence, params = part.sequence, part.sequence.params
        if not part.samples or sequence.num_output == 0 or not params.speculation:
            return 0  # the first output token comes with the prompt's pass, without a draft
        if part.num_tokens > 1:  # recomputing after a preemption
            sequence.lengths_fixed = False
            return 0
        fixed = min(
            self.max_draft_tokens,
            params.max_tokens - sequence.num_output - 1,
            self.max_model_len - len(sequence.tokens) - 1,
        )
        limit = min(fixed, budget)
        if limit > 0:
            start = sequence.num_computed
            limit = min(limit, self.cache.num_allocatable(sequence.id, num_computed=start) - 1)
        if limit < fixed:
            sequence.lengths_fixed = False
        if limit <= 0:
            return 0
        copies = self.cache.allocate(sequence.id, num_computed=sequence.num_computed, num_new=1 + limit)
        assert copies is not None, "num_allocatable promised these blocks"
        part.copies += copies
        part.draft_limit = limit
        return limit

    def _admit(self, sequence: Sequence, budget: int) -> ScheduledSequence | None:
        """Takes the first waiting sequence in if its next chunk fits; never preempts for it."""
        leader = sequence.request.sequences[0]
        if sequence is not leader and sequence.num_output == 0 and leader in self.running:
            shared = sequence.prompt_length - 1
            if leader.num_computed < shared:
                return None  # its prompt is being computed right now: wait and share it
            self.cache.fork(leader.id, sequence.id, shared)
            sequence.num_computed = shared
        elif not sequence.wants_prompt_rows:
            sequence.num_computed = self.cache.match_prefix(sequence.id, sequence.tokens.view())
        num_tokens = min(sequence.pending, budget)
        copies = self.cache.allocate(sequence.id, num_computed=sequence.num_computed, num_new=num_tokens)
        if copies is None:
            self.cache.free(sequence.id)
            sequence.num_computed = 0
            return None
        if sequence.scheduled_at is None:
            sequence.note_scheduled()
        self.waiting.popleft()
        self.running.append(sequence)
        return _part(sequence, num_tokens, copies)


def _part(sequence: Sequence, num_tokens: int, copies: list[tuple[int, int]]) -> ScheduledSequence:
    return ScheduledSequence(sequence, num_tokens, samples=num_tokens == sequence.pending, copies=copies)
