"""Drafting with a smaller model of the same vocabulary: it writes ahead, one token a pass for all requests together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from paceline.cache.manager import CacheManager
from paceline.errors import DraftMismatchError
from paceline.interfaces import Drafter, Runner
from paceline.sampling.noise import DRAFT, SAMPLE, purpose_word
from paceline.sampling.processors import PenaltyState, RowAdjustments, allowed_mask, pack_adjustments
from paceline.types import Adjustments, Draft, DraftLaw, ForwardBatch, RequestView, RowSampling


@dataclass(slots=True)
class _State:
    """What is kept for a request between calls."""

    computed: np.ndarray  # tokens whose K/V is in the cache
    penalties: PenaltyState
    num_noted: int  # known tokens that the penalties have seen
    allowed: np.ndarray | None  # [ceil(V/8)] uint8 bit mask, None = all tokens


@dataclass(slots=True)
class _Job:
    """One request's part of a call of propose: known tokens, then drafted ones, of which some are computed."""

    view: RequestView
    state: _State
    tokens: np.ndarray  # [known + to be drafted] int32
    num_computed: int
    length: int  # known + drafted so far
    laws: list[np.ndarray] = field(default_factory=list)  # [V] of each drafted token

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 when the draft is complete."""
        return self.length - self.num_computed if self.length < len(self.tokens) else 0


class DraftModelDrafter(Drafter):
    """Proposes a chain that the draft model sampled with the request's own parameters.

    The model has its own K/V cache, which follows each request: what verification dropped is rolled back, what the
    model has not seen yet is caught up in chunks together with the drafting of others. A request that does not fit into
    the model's context or cache gets no draft.

    rule_needs_law: the rule wants to know what the tokens were sampled from (`rejection`, `block`), so they are drawn
    with words of their own. Otherwise they are drawn with the very noise the target uses, which makes the two agree
    most often. vocab_size: the target's, where padding makes it differ from the runner's; None = the same.
    eos_ids: the tokens that min_tokens bans.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        name: str = "draft_model",
        rule_needs_law: bool,
        prefix_caching: bool = False,
        vocab_size: int | None = None,
        eos_ids: frozenset[int] = frozenset(),
        max_num_batched_tokens: int = 512,
    ) -> None:
        self.name = name
        self._runner = runner
        self._rule_needs_law = rule_needs_law
        self._vocab_size = vocab_size or runner.vocab_size
        self._eos_ids = eos_ids
        self._max_num_batched_tokens = max_num_batched_tokens
        self.cache = CacheManager(
            num_blocks=runner.kv.num_blocks, block_size=runner.kv.block_size, prefix_caching=prefix_caching
        )
        self._states: dict[str, _State] = {}

    def propose(self, views: Sequence[RequestView], budgets: Sequence[int]) -> list[Draft | None]:
        jobs = [self._begin(view, budget) for view, budget in zip(views, budgets, strict=True)]
        while parts := self._next_pass([job for job in jobs if job is not None]):
            self._run(parts)
        return [self._finish(job) if job is not None else None for job in jobs]

    def release(self, request_id: str) -> None:
        self.cache.free(request_id)
        self._states.pop(request_id, None)

    def _begin(self, view: RequestView, budget: int) -> _Job | None:
        """Rolls back to what is still right and reserves blocks; None, with nothing held, when there is no room."""
        known, request_id = view.token_ids, view.request_id
        if not self._can_read(view):
            self.release(request_id)
            return None
        if request_id not in self._states:
            self._states[request_id] = self._new_state(view)
        state = self._states[request_id]
        start = min(len(state.computed), len(known) - 1)  # one token at least is computed anew, for its row
        wrong = np.flatnonzero(state.computed[:start] != known[:start])
        start = int(wrong[0]) if len(wrong) else start
        room = min(self.cache.num_allocatable(request_id, num_computed=start) + start, self._runner.max_model_len)
        num_draft = min(budget, room - len(known) + 1)  # the last drafted token is not computed
        if num_draft < 1:
            self.release(request_id)
            return None
        copies = self.cache.allocate(request_id, num_computed=start, num_new=len(known) + num_draft - 1 - start)
        if copies:  # a block of guesses that another request also made, and found here
            self._runner.move(*self.cache.copy_slots(copies))
        state.computed = state.computed[:start]  # all that holds if a pass is interrupted
        if state.penalties.active:
            state.penalties.append(known[state.num_noted :].tolist())
        state.num_noted = len(known)
        tokens = np.empty(len(known) + num_draft, dtype=np.int32)
        tokens[: len(known)] = known
        return _Job(view, state, tokens, start, len(known))

    def _can_read(self, view: RequestView) -> bool:
        """False if the request names tokens that only the target's larger vocabulary has."""
        if self._vocab_size <= self._runner.vocab_size:
            return True
        params = view.params
        named = (*params.logit_bias, *params.banned_token_ids, *(params.allowed_token_ids or ()))
        return max((int(view.token_ids.max()), *named)) < self._runner.vocab_size

    def _new_state(self, view: RequestView) -> _State:
        size = self._runner.vocab_size
        allowed = allowed_mask(view.params, vocab_size=size)
        if allowed is None and self._vocab_size < size:
            allowed = np.packbits(np.arange(size) < self._vocab_size, bitorder="little")
        prompt = view.token_ids[: view.prompt_length]
        penalties = PenaltyState(view.params, prompt, eos_ids=self._eos_ids, vocab_size=size)
        num_cached = self.cache.match_prefix(view.request_id, view.token_ids)
        return _State(view.token_ids[:num_cached].copy(), penalties, view.prompt_length, allowed)

    def _next_pass(self, jobs: list[_Job]) -> list[tuple[_Job, int]]:
        """Jobs that have tokens to compute, and how many in this pass."""
        parts, room = [], self._max_num_batched_tokens
        for job in jobs:
            count = min(job.pending, room)
            if count:
                parts.append((job, count))
                room -= count
        return parts

    def _run(self, parts: list[tuple[_Job, int]]) -> None:
        """One pass; samples the next token of every job whose pending tokens are all in it."""
        sampled = [job for job, count in parts if count == job.pending]
        output = self._runner.forward(self._pack(parts), self._row_sampling(sampled) if sampled else None)
        for job, count in parts:
            job.num_computed += count
        for row, job in enumerate(sampled):
            assert output.token_ids is not None
            job.tokens[job.length] = output.token_ids[row]
            job.length += 1
            if self._rule_needs_law:
                assert output.laws is not None
                job.laws.append(output.laws[row, : self._vocab_size])

    def _pack(self, parts: list[tuple[_Job, int]]) -> ForwardBatch:
        counts = np.array([count for _, count in parts])
        spans = [slice(job.num_computed, job.num_computed + count) for job, count in parts]
        ends = np.cumsum(counts)
        through = [count == job.pending for job, count in parts]
        ids = [job.view.request_id for job, _ in parts]
        return ForwardBatch(
            token_ids=np.concatenate([job.tokens[span] for (job, _), span in zip(parts, spans, strict=True)]),
            positions=np.concatenate([np.arange(span.start, span.stop, dtype=np.int32) for span in spans]),
            slots=np.concatenate(
                [self.cache.slots(i, s.start, s.stop - s.start) for i, s in zip(ids, spans, strict=True)]
            ),
            query_starts=np.concatenate([[0], ends]).astype(np.int32),
            context_lengths=np.array([span.start for span in spans], dtype=np.int32),
            block_tables=[self.cache.block_table(i) for i in ids],
            ancestors=[None] * len(parts),
            logit_rows=(ends[through] - 1).astype(np.int32),
        )

    def _row_sampling(self, jobs: list[_Job]) -> RowSampling:
        params = [job.view.params for job in jobs]
        if self._rule_needs_law:
            purposes = [purpose_word(DRAFT, job.view.attempt) for job in jobs]
        else:
            purposes = [purpose_word(SAMPLE)] * len(jobs)
        allowed = None
        if any(job.state.allowed is not None for job in jobs):
            everything = np.full(-(-self._runner.vocab_size // 8), 0xFF, dtype=np.uint8)
            allowed = np.stack([everything if job.state.allowed is None else job.state.allowed for job in jobs])
        return RowSampling(
            temperature=np.array([p.temperature for p in params], dtype=np.float32),
            top_k=np.array([p.top_k for p in params], dtype=np.int32),
            top_p=np.array([p.top_p for p in params], dtype=np.float32),
            min_p=np.array([p.min_p for p in params], dtype=np.float32),
            seed=np.array([job.view.seed for job in jobs], dtype=np.uint64),
            stream=np.array([job.view.stream for job in jobs], dtype=np.uint32),
            position=np.array([job.length for job in jobs], dtype=np.uint32),
            purpose=np.array(purposes, dtype=np.uint32),
            adjustments=_adjustments(jobs),
            allowed=allowed,
            want_laws=self._rule_needs_law,
        )

    def _finish(self, job: _Job) -> Draft:
        self.cache.commit(job.view.request_id, job.tokens, job.num_computed)
        job.state.computed = job.tokens[: job.num_computed]
        drafted = job.tokens[len(job.view.token_ids) :]
        if not self._rule_needs_law:
            return Draft.chain(drafted, source=self.name)
        probs = np.stack(job.laws)
        return Draft(
            token_ids=drafted,
            parents=np.arange(-1, len(drafted) - 1, dtype=np.int32),
            law=DraftLaw(probs, ids=None if probs.shape[1] == self._vocab_size else np.arange(probs.shape[1])),
            confidence=probs[np.arange(len(drafted)), drafted],
            source=self.name,
        )


def _adjustments(jobs: list[_Job]) -> Adjustments | None:
    """Bias, bans and penalties of each job's next token, with what is drafted so far as history."""
    if not any(job.state.penalties.active for job in jobs):
        return None
    rows: list[RowAdjustments | None] = []
    for job in jobs:
        if job.state.penalties.active:
            num_known = len(job.view.token_ids)
            drafted = Draft.chain(job.tokens[num_known : job.length], source="")
            rows.append(job.state.penalties.rows(drafted, num_output=num_known - job.view.prompt_length)[-1])
        else:
            rows.append(None)
    return pack_adjustments(rows)


class _Vocabulary(Protocol):
    """The part of a tokenizer that the check needs."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def token_text(self, token_id: int) -> str: ...


def check_same_vocabulary(target_tokenizer: _Vocabulary, draft_tokenizer: _Vocabulary) -> None:
    """Raises DraftMismatchError, with the first difference, unless both tokenizers have the same tokens."""
    if target_tokenizer.fingerprint == draft_tokenizer.fingerprint:
        return
    sizes = target_tokenizer.vocab_size, draft_tokenizer.vocab_size
    reason = "another fingerprint" if sizes[0] == sizes[1] else f"{sizes[1]} tokens instead of {sizes[0]}"
    for token_id in range(min(sizes)):
        texts = target_tokenizer.token_text(token_id), draft_tokenizer.token_text(token_id)
        if texts[0] != texts[1]:
            reason += f", first differing at token {token_id}, {texts[1]!r} instead of {texts[0]!r}"
            break
    raise DraftMismatchError(
        f"the draft model must have the target's vocabulary; it has {reason}. Choose a model of the target's family."
    )
