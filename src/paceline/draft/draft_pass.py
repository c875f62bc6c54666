"""A pass of a draft model over several requests: pending tokens in, the next token of each request out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from paceline.cache.manager import CacheManager
from paceline.sampling.noise import DRAFT, SAMPLE, purpose_word
from paceline.sampling.processors import PenaltyState, RowAdjustments, pack_adjustments
from paceline.types import Adjustments, Draft, ForwardBatch, RequestView, RowSampling, TokenMap


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
    drafted: list[int] = field(default_factory=list)  # the target's ids
    laws: list[np.ndarray] = field(default_factory=list)  # [V] of each drafted token

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled; 0 when the draft is complete."""
        return self.length - self.num_computed if self.length < len(self.tokens) else 0


class Part(NamedTuple):
    """A job's share of a pass: its next `count` pending tokens."""

    job: DraftJob
    count: int


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


def row_sampling(jobs: list[DraftJob], *, token_map: TokenMap | None, want_laws: bool) -> RowSampling:
    """How the next token of each job is drawn: as the target would, with its noise, unless laws are wanted."""
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
        position=np.array([len(job.view.token_ids) + len(job.drafted) for job in jobs], dtype=np.uint32),
        purpose=np.array(purposes, dtype=np.uint32),
        adjustments=_adjustments(jobs),
        allowed=allowed,
        token_map=token_map,
        want_laws=want_laws,
    )


def _adjustments(jobs: list[DraftJob]) -> Adjustments | None:
    """Bias, bans and penalties of each job's next token, with what is drafted so far as history."""
    if not any(job.state.penalties.active for job in jobs):
        return None
    rows: list[RowAdjustments | None] = []
    for job in jobs:
        if job.state.penalties.active:
            drafted = Draft.chain(job.drafted, source="")
            num_output = len(job.view.token_ids) - job.view.prompt_length
            rows.append(job.state.penalties.rows(drafted, num_output=num_output)[-1])
        else:
            rows.append(None)
    return pack_adjustments(rows)
