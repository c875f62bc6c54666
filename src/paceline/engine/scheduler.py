"""Who computes what in the next step: in order of rank, without phases.

Prefill, chunked prefill, decoding and recomputing after a preemption are one thing: computing pending tokens.

A sequence's rank is one order for everything: who is let in first, whose tokens come first and, from the other end,
who gives way. First comes the more important request (lower `priority`), then whoever came first, and choice i of a
request counts as having come i requests later: many choices share the engine with those that come after them.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

import numpy as np

from paceline.cache.manager import CacheManager
from paceline.config import SchedulerConfig
from paceline.engine.request import Sequence
from paceline.errors import CacheError
from paceline.params import SamplingParams
from paceline.types import Draft, RequestView

_rank = attrgetter("rank")


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part of a step."""

    sequence: Sequence
    num_tokens: int  # pending tokens to compute
    samples: bool  # all pending tokens are computed, so that the pass yields a new one
    draft_limit: int = 0  # nodes that may be drafted on top
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, destination) blocks to copy before writing
    allowed: np.ndarray | None = None  # [1 + nodes, ceil(V/8)] uint8, bit masks of its rows, if it has a grammar
    _view: RequestView | None = field(default=None, init=False)

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
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        *,
        max_model_len: int,
        max_draft_tokens: int,
        max_predicted_tokens: int,
    ) -> None:
        self.config = config
        self.cache = cache
        self.max_model_len = max_model_len
        self.max_draft_tokens = max_draft_tokens
        self.max_predicted_tokens = max_predicted_tokens  # the same of requests with a prediction
        self.waiting: list[Sequence] = []  # both by rank, first in rank first
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # prompt tokens looked up in the prefix cache, by sequences not yet begun
        self.num_prefix_hits = 0  # those of them that were there

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """The sequence is finished or cancelled: its blocks are free again. Unknown ones are ignored."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.cache.free(sequence.id)

    def schedule(self) -> tuple[list[ScheduledSequence], list[Sequence]]:
        """The next step's parts, and the sequences that were preempted to make room for them."""
        step = _Step(self.config.max_num_batched_tokens)
        prompts = []
        for sequence in self.running.copy():  # decoding sequences first, so that no prompt holds them up
            if sequence.pending > 1:
                prompts.append(sequence)
            else:
                self._compute(sequence, step)
        share = step.budget // 2
        if any(sequence.pending > share for sequence in prompts):  # a long prompt leaves short ones half of the step
            kept = step.budget - share
            for sequence in prompts:
                if sequence.pending <= share:
                    self._compute(sequence, step, kept=kept)
            self._admit_waiting(step, longest=share, kept=kept)
        for sequence in prompts:
            self._compute(sequence, step)
        self._admit_waiting(step)
        self._allow_drafts(step)
        if not step.parts and self.waiting and not self.running:
            raise CacheError(
                f"{self.cache.num_blocks} KV blocks of {self.cache.block_size} tokens hold not even one request. "
                "Raise kv_cache_memory or lower max_model_len."
            )
        return list(step.parts.values()), step.preempted

    def roll_back(self, plan: list[ScheduledSequence]) -> None:
        """Frees what a step reserved and did not keep; full blocks become findable by their prefix."""
        for part in plan:
            sequence = part.sequence
            if sequence.finish_reason is None:
                self.cache.commit(sequence.id, sequence.tokens.view(), sequence.num_computed)

    def _compute(self, sequence: Sequence, step: _Step, *, kept: int = 0) -> None:
        """Schedules pending tokens of a running sequence, preempting the last in rank while blocks are lacking.

        `kept` tokens of the step are left over.
        """
        pending = sequence.pending
        num_tokens = min(pending, step.budget - kept)
        if num_tokens <= 0 or sequence.id in step.parts or sequence in step.preempted:
            return
        while True:
            copies = self.cache.allocate(sequence.id, num_computed=sequence.num_computed, num_new=num_tokens)
            if copies is not None:
                step.add(ScheduledSequence(sequence, num_tokens, samples=num_tokens == pending, copies=copies))
                return
            last = self.running[-1]
            self._preempt(last, step)
            if last is sequence:
                return

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        self.running.remove(sequence)
        self.cache.free(sequence.id)
        sequence.num_computed = 0
        insort(self.waiting, sequence, key=_rank)
        self.num_preemptions += 1
        step.drop(sequence)

    def _give_way(self, to: Sequence, step: _Step) -> bool:
        """Preempts the last of the running sequences, if it ranks behind."""
        if not self.running or self.running[-1].rank < to.rank:
            return False
        self._preempt(self.running[-1], step)
        return True

    def _admit_waiting(self, step: _Step, *, longest: int | None = None, kept: int = 0) -> None:
        """Lets sequences in by rank until one lacks a place or blocks. `kept` tokens of the step are left over.

        Passed over are those with more than `longest` tokens to compute, and choices whose prompt the first one is
        computing right now: they will share it.
        """
        if step.preempted:
            return
        for sequence in self.waiting.copy():
            if step.budget <= kept:
                return
            if (longest is not None and sequence.pending > longest) or self._prompt_is_coming(sequence):
                continue
            if not self._admit(sequence, step, kept=kept):
                return

    def _prompt_is_coming(self, sequence: Sequence) -> bool:
        leader = sequence.request.sequences[0]
        return self._shares(sequence) and leader.num_computed < sequence.prompt_length - 1

    def _shares(self, sequence: Sequence) -> bool:
        """It begins with what the first choice has computed, or is computing, of the prompt."""
        leader = sequence.request.sequences[0]
        return sequence is not leader and sequence.num_output == 0 and leader in self.running

    def _admit(self, sequence: Sequence, step: _Step, *, kept: int) -> bool:
        """Takes a waiting sequence in if there is a place, and blocks for its next tokens, or if others give way."""
        while len(self.running) >= self.config.max_num_seqs:
            if not self._give_way(sequence, step):
                return False
        looked_up = False
        if self._shares(sequence):
            shared = sequence.prompt_length - 1
            self.cache.fork(sequence.request.sequences[0].id, sequence.id, shared)
            sequence.num_computed = shared
        elif not sequence.wants_prompt_rows:
            looked_up = self.cache.prefix_caching
            sequence.num_computed = self.cache.match_prefix(sequence.id, sequence.tokens.view())
        pending = sequence.pending
        num_tokens = min(pending, step.budget - kept)
        while (
            copies := self.cache.allocate(sequence.id, num_computed=sequence.num_computed, num_new=num_tokens)
        ) is None:
            if not self._give_way(sequence, step):
                self.cache.free(sequence.id)
                sequence.num_computed = 0
                return False
        if sequence.scheduled_at is None:
            sequence.note_scheduled()
            if looked_up:
                self.num_prefix_queries += sequence.prompt_length
                self.num_prefix_hits += sequence.num_cached_tokens
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_rank)
        step.add(ScheduledSequence(sequence, num_tokens, samples=num_tokens == pending, copies=copies))
        return True

    def _allow_drafts(self, step: _Step) -> None:
        """Reserves rows and blocks for drafts, as far as nobody else needs them. Rows that are short are shared out:
        nobody gets more than one more than another who wants them, too."""
        wanted = [(nodes, part) for part in step.parts.values() if (nodes := self._num_nodes_wanted(part)) > 0]
        wanted.sort(key=itemgetter(0))  # what the modest leave is the others'
        for num_left, (nodes, part) in zip(range(len(wanted), 0, -1), wanted, strict=True):
            sequence = part.sequence
            limit = min(nodes, -(-step.budget // num_left))
            if limit > 0:
                start = sequence.num_computed
                limit = min(limit, self.cache.num_allocatable(sequence.id, num_computed=start) - 1)
            if limit < nodes:
                sequence.lengths_fixed = False
            if limit <= 0:
                continue
            copies = self.cache.allocate(sequence.id, num_computed=sequence.num_computed, num_new=1 + limit)
            assert copies is not None, "num_allocatable promised these blocks"
            part.copies += copies
            part.draft_limit = limit
            step.budget -= limit

    def _num_nodes_wanted(self, part: ScheduledSequence) -> int:
        """Nodes that a sequence may draft if it has the step to itself."""
        sequence, params = part.sequence, part.sequence.params
        if not part.samples or sequence.num_output == 0 or not params.speculates:
            return 0  # the first output token comes with the prompt's pass, without a draft
        if part.num_tokens > 1:  # recomputing after a preemption
            sequence.lengths_fixed = False
            return 0
        return min(
            self._max_nodes(params),
            params.max_tokens - sequence.num_output - 1,
            self.max_model_len - len(sequence.tokens) - 1,
        )

    def _max_nodes(self, params: SamplingParams) -> int:
        """Nodes of a request's drafts by settings alone."""
        most = self.max_predicted_tokens if params.prediction else self.max_draft_tokens
        cap = params.drafting.num_speculative_tokens
        return most if cap is None else min(most, int(cap))


class _Step:
    """A step while it is being planned."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens that it may still take
        self.parts: dict[str, ScheduledSequence] = {}  # by the sequence's id
        self.preempted: list[Sequence] = []

    def add(self, part: ScheduledSequence) -> None:
        self.parts[part.sequence.id] = part
        self.budget -= part.num_tokens

    def drop(self, sequence: Sequence) -> None:
        self.preempted.append(sequence)
        dropped = self.parts.pop(sequence.id, None)
        self.budget += dropped.num_tokens if dropped is not None else 0
