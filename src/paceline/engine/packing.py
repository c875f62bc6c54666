"""From a plan and its drafts to one packed pass, and back to each sequence's rows."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import NamedTuple

import numpy as np

from paceline.cache.manager import CacheManager
from paceline.engine.request import Sequence
from paceline.engine.scheduler import ScheduledSequence
from paceline.sampling.processors import pack_adjustments
from paceline.types import Adjustments, Draft, ForwardBatch, RowSampling


class Rows(NamedTuple):
    """Where one sequence's logits rows stand among the M rows of the pass."""

    prompt: slice  # one a prompt token whose log-probability is wanted
    sample: slice  # the root's row, then one a draft node; empty while the prompt is not through


def pack(
    plan: list[ScheduledSequence],
    drafts: list[Draft | None],
    cache: CacheManager,
    *,
    want_laws: bool,
    hidden_layers: tuple[int | str, ...] = (),
    num_successors: int = 0,
) -> tuple[ForwardBatch, RowSampling | None, list[Rows]]:
    """Pending tokens and draft nodes of all sequences, one sequence after another."""
    token_ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    ancestors: list[np.ndarray | None] = []
    query_starts = [0]
    logit_rows: list[int] = []
    rows: list[Rows] = []
    row_start = 0
    for part, draft in zip(plan, drafts, strict=True):
        sequence, start, first = part.sequence, part.sequence.num_computed, query_starts[-1]
        count = part.num_tokens + (0 if draft is None else len(draft))
        token_ids.append(sequence.tokens.view()[start : start + part.num_tokens])
        if draft is not None:
            token_ids.append(draft.token_ids)
        # The i-th token of a sequence's part has key index start + i. That is its position, too, except in trees.
        positions.append(np.arange(start, start + count, dtype=np.int32))
        ancestors.append(None)
        if draft is not None and not draft.is_chain:
            positions[-1][part.num_tokens :] = draft.depths() + (start + part.num_tokens - 1)
            ancestors[-1] = ancestor_mask(draft, num_before=part.num_tokens)
        slots.append(cache.slots(sequence.id, start, count))
        own = _rows(part, draft, row_start)
        if own.prompt.stop > own.prompt.start:
            at = first + _first_prompt_row(sequence) - start
            logit_rows += range(at, at + own.prompt.stop - own.prompt.start)
        at = first + part.num_tokens - 1
        logit_rows += range(at, at + own.sample.stop - own.sample.start)
        rows.append(own)
        row_start = own.sample.stop
        query_starts.append(first + count)
    batch = ForwardBatch(
        token_ids=_joined(token_ids),
        positions=_joined(positions),
        slots=_joined(slots),
        query_starts=np.array(query_starts, dtype=np.int32),
        context_lengths=np.array([part.sequence.num_computed for part in plan], dtype=np.int32),
        block_tables=[cache.block_table(part.sequence.id) for part in plan],
        ancestors=ancestors,
        logit_rows=np.array(logit_rows, dtype=np.int32),
        hidden_layers=hidden_layers,
    )
    if not row_start:
        return batch, None, rows
    sampled_positions = batch.positions[batch.logit_rows].astype(np.uint32) + np.uint32(1)
    sampling = _row_sampling(plan, drafts, rows, sampled_positions, want_laws=want_laws, num_successors=num_successors)
    return batch, sampling, rows


def _rows(part: ScheduledSequence, draft: Draft | None, row_start: int) -> Rows:
    """The rows that a sequence wants, numbered from row_start."""
    sequence, split = part.sequence, row_start
    if sequence.wants_prompt_rows:
        end = min(sequence.num_computed + part.num_tokens, sequence.prompt_length - 1)
        split += max(0, end - _first_prompt_row(sequence))
    num_sample_rows = 0 if not part.samples else 1 if draft is None else 1 + len(draft)
    return Rows(slice(row_start, split), slice(split, split + num_sample_rows))


def _joined(parts: Several[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def ancestor_mask(draft: Draft, *, num_before: int) -> np.ndarray:
    """[n, n] bool over the pass's own tokens: num_before causal ones (the root last), then the nodes."""
    mask = np.tri(num_before + len(draft), dtype=bool)
    mask[num_before:, num_before:] = draft.ancestors()
    return mask


def _first_prompt_row(sequence: Sequence) -> int:
    """Token index of the first row of this pass whose prompt log-probability is still wanted."""
    return max(sequence.num_computed, len(sequence.prompt_logprobs))


def _row_sampling(
    plan: list[ScheduledSequence],
    drafts: list[Draft | None],
    rows: list[Rows],
    positions: np.ndarray,
    *,
    want_laws: bool,
    num_successors: int,
) -> RowSampling:
    sequences = [part.sequence for part in plan]
    owned = [s.row_constants(own.sample.stop - own.prompt.start) for s, own in zip(sequences, rows, strict=True)]
    temperature, top_k, top_p, min_p, seed, stream, purpose = map(_joined, zip(*owned, strict=True))
    wanted = [s.params.logprobs for s in sequences if s.params.logprobs is not None]
    logprob_ids = None
    for sequence, own in zip(sequences, rows, strict=True):
        count = own.prompt.stop - own.prompt.start
        if count:  # these rows report on the prompt's own next token; nobody reads what they would sample
            if logprob_ids is None:
                temperature = temperature.copy()
                logprob_ids = np.full(len(positions), -1, dtype=np.int32)
            at = _first_prompt_row(sequence) + 1
            logprob_ids[own.prompt] = sequence.tokens.view()[at : at + count]
            temperature[own.prompt] = 0.0
            wanted.append(sequence.params.prompt_logprobs or 0)
    return RowSampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stream=stream,
        position=positions,
        purpose=purpose,
        adjustments=_adjustments(sequences, drafts, rows),
        allowed=_allowed(plan, rows),
        num_logprobs=max(wanted, default=None),
        logprob_ids=logprob_ids,
        num_successors=num_successors,
        want_logits=want_laws and bool(wanted),
        want_laws=want_laws and any(draft is not None for draft in drafts),
    )


def _adjustments(sequences: list[Sequence], drafts: list[Draft | None], rows: list[Rows]) -> Adjustments | None:
    if not any(s.penalties.active for s in sequences):
        return None
    adjusted = []
    for sequence, draft, where in zip(sequences, drafts, rows, strict=True):
        adjusted += [None] * (where.prompt.stop - where.prompt.start)
        if where.sample.stop > where.sample.start:
            if sequence.penalties.active:
                adjusted += sequence.penalties.rows(draft, num_output=sequence.num_output)
            else:
                adjusted += [None] * (where.sample.stop - where.sample.start)
    return pack_adjustments(adjusted)


def _allowed(plan: list[ScheduledSequence], rows: list[Rows]) -> np.ndarray | None:
    """[M, ceil(V/8)] bit masks, or None when no sequence restricts its tokens."""
    own = [part.sequence.allowed if part.allowed is None else part.allowed for part in plan]
    restricted = [(allowed, where.sample) for allowed, where in zip(own, rows, strict=True) if allowed is not None]
    if not restricted:
        return None
    masks = np.full((rows[-1].sample.stop, restricted[0][0].shape[-1]), 0xFF, dtype=np.uint8)
    for allowed, where in restricted:
        masks[where] = allowed
    return masks
