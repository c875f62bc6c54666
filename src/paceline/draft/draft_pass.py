"""A pass of a draft model over several requests: pending tokens in, the next token of each request out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from paceline.cache.manager import CacheManager
from paceline.draft.row_sampling import NextRow, SamplingState
from paceline.types import ForwardBatch, ForwardOutput, RequestView

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
    sampling: SamplingState


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
    def next_row(self) -> NextRow:
        return NextRow(self.view, self.state.sampling, self.drafted)

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
