"""A pass of a draft model over several requests: pending tokens in, the next token of each request out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from paceline.cache.manager import CacheManager
from paceline.sampling.noise import DRAFT, SAMPLE, purpose_word
from paceline.sampling.processors import PenaltyState, RowAdjustments, pack_adjustments
from paceline.types import Adjustments, Draft, ForwardBatch, ForwardOutput, RequestView, RowSampling, TokenMap

NUM_CANDIDATES = 8  # of a row, in order to tell how clearly the best of them wins


class Candidates(NamedTuple):
    """The tokens that came nearest to being sampled, best first, and the chance of each that the target samples it.

    The target's scores are seen as the draft model's with noise added to their logarithms, of the kind and size that
    turns greedy choices into samples at temperature 1: the chance is a softmax over log race scores. Where the row is
    greedy, that is the model's own probability among its candidates.
    """

    ids: list[int]  # [k], the target's
    chances: np.ndarray  # [k]

    @classmethod
    def of(cls, output: ForwardOutput, row: int) -> Candidates:
        assert output.candidates is not None
        assert output.candidate_scores is not None
        count = int(np.count_nonzero(output.candidates[row] >= 0))
        scores = output.candidate_scores[row, :count].astype(np.float64)
        chances = np.exp(scores - scores.max(initial=-np.inf))
        return cls(output.candidates[row, :count].tolist(), chances / chances.sum())


@dataclass(slots=True)
class DraftState:
    """What is kept for a request between calls."""

    computed: np.ndarray  # the model's tokens whose K/V is in the cache
    penalties: PenaltyState
    num_noted: int  # known tokens of the target that the penalties have seen
    allowed: np.ndarray | None  # [ceil(V/8)] uint8 bit mask, None = all tokens


@dataclass(slots=True)
class DraftJob:
    """One request's part of a call of propose: known tokens, then drafted ones, of which some are computed."""

    view: RequestView
    state: DraftState
    tokens: np.ndarray  # [known + to be drafted] int32, the model's own
    num_computed: int
    length: int  # known + drafted so far
    num_draft: int  # nodes at most
    drafted: list[int] = field(default_factory=list)  # the target's ids
    laws: list[np.ndarray] = field(default_factory=list)  # [V] of each drafted token, where a rule needs them
    chances: list[float] = field(default_factory=list)  # of each drafted token, to be accepted after the one before
    candidates: Candidates | None = None  # of the last row; None where laws are wanted

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 when the draft is complete."""
        return self.length - self.num_computed if self.length < len(self.tokens) else 0

    @property
    def reach(self) -> float:
        """Chance that the target comes to the end of what is drafted."""
        return math.prod(self.chances)

    def draft(self, token_ids: list[int], chance: float) -> None:
        """Goes on to these drafted tokens: one more, of this chance, or fewer where some were spelled together."""
        self.drafted = token_ids
        self.chances.append(chance)
        while len(self.chances) > len(token_ids):
            last = self.chances.pop()
            self.chances[-1] *= last
        self.chances += [1.0] * (len(token_ids) - len(self.chances))

    def end(self) -> None:
        """What is drafted now is the draft."""
        self.tokens = self.tokens[: self.length]


class Part(NamedTuple):
    """A job's share of a pass: some of its pending tokens, the first ones."""

    job: DraftJob
    num_tokens: int


def next_parts(jobs: list[DraftJob], max_num_tokens: int) -> list[Part]:
    """Jobs that have tokens to compute, and how many in this pass."""
    parts, room = [], max_num_tokens
    for job in jobs:
        count = min(job.pending, room)
        if count:
            parts.append(Part(job, count))
            room -= count
    return parts


def pack(parts: list[Part], cache: CacheManager) -> ForwardBatch:
    """One packed pass; the last row of every job whose pending tokens are all in it is wanted."""
    counts = np.array([count for _, count in parts])
    spans = [slice(job.num_computed, job.num_computed + count) for job, count in parts]
    ends = np.cumsum(counts)
    through = [count == job.pending for job, count in parts]
    ids = [job.view.request_id for job, _ in parts]
    return ForwardBatch(
        token_ids=np.concatenate([job.tokens[span] for (job, _), span in zip(parts, spans, strict=True)]),
        positions=np.concatenate([np.arange(span.start, span.stop, dtype=np.int32) for span in spans]),
        slots=np.concatenate([cache.slots(i, s.start, s.stop - s.start) for i, s in zip(ids, spans, strict=True)]),
        query_starts=np.concatenate([[0], ends]).astype(np.int32),
        context_lengths=np.array([span.start for span in spans], dtype=np.int32),
        block_tables=[cache.block_table(i) for i in ids],
        ancestors=[None] * len(parts),
        logit_rows=(ends[through] - 1).astype(np.int32),
    )


def row_sampling(
    jobs: list[DraftJob],
    *,
    positions: list[int],
    adjustments: Adjustments | None,
    token_map: TokenMap | None,
    want_laws: bool,
) -> RowSampling:
    """How rows of these jobs, some perhaps of the same, are drawn for the tokens at positions of the target's text.

    As the target would, with its noise, and with candidates; where laws are wanted with words of their own and without.
    """
    params = [job.view.params for job in jobs]
    allowed = None
    if masks := [job.state.allowed for job in jobs if job.state.allowed is not None]:
        everything = np.full_like(masks[0], 0xFF)
        allowed = np.stack([everything if job.state.allowed is None else job.state.allowed for job in jobs])
    purposes = [purpose_word(DRAFT, job.view.attempt) if want_laws else purpose_word(SAMPLE) for job in jobs]
    return RowSampling(
        temperature=np.array([p.temperature for p in params], dtype=np.float32),
        top_k=np.array([p.top_k for p in params], dtype=np.int32),
        top_p=np.array([p.top_p for p in params], dtype=np.float32),
        min_p=np.array([p.min_p for p in params], dtype=np.float32),
        seed=np.array([job.view.seed for job in jobs], dtype=np.uint64),
        stream=np.array([job.view.stream for job in jobs], dtype=np.uint32),
        position=np.array(positions, dtype=np.uint32),
        purpose=np.array(purposes, dtype=np.uint32),
        adjustments=adjustments,
        allowed=allowed,
        token_map=token_map,
        num_candidates=0 if want_laws else NUM_CANDIDATES,
        want_laws=want_laws,
    )


def chain_adjustments(jobs: list[DraftJob]) -> Adjustments | None:
    """Bias, bans and penalties of each job's next token, with what is drafted so far as history."""
    rows = [adjusted_rows(job, Draft.chain(job.drafted, source=""))[-1] for job in jobs]
    return None if all(row is None for row in rows) else pack_adjustments(rows)


def adjusted_rows(job: DraftJob, draft: Draft) -> Sequence[RowAdjustments | None]:
    """Adjustments of the root's row and of each node's, None where the request asks for none."""
    if not job.state.penalties.active:
        return [None] * (1 + len(draft))
    return job.state.penalties.rows(draft, num_output=len(job.view.token_ids) - job.view.prompt_length)
