"""From a plan and its drafts to one packed pass, and back to each sequence's rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.cache.manager import CacheManager
from paceline.engine.request import Sequence
from paceline.engine.scheduler import ScheduledSequence
from paceline.sampling.noise import SAMPLE
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
    logit_rows: list[int] = []
    rows: list[Rows] = []
    starts = np.array([part.sequence.num_computed for part in plan], dtype=np.int32)
    num_nodes = [0 if draft is None else len(draft) for draft in drafts]
    query_starts = np.zeros(len(plan) + 1, dtype=np.int32)
    np.cumsum([part.num_tokens + nodes for part, nodes in zip(plan, num_nodes, strict=True)], out=query_starts[1:])
    row_start = 0
    for part, draft, first in zip(plan, drafts, query_starts.tolist(), strict=False):
        sequence, start = part.sequence, part.sequence.num_computed
        token_ids.append(sequence.tokens.view()[start : start + part.num_tokens])
        if draft is not None:
            token_ids.append(draft.token_ids)
        own = _rows(part, draft, row_start)
        if own.prompt.stop > own.prompt.start:
            at = first + _first_prompt_row(sequence) - start
            logit_rows += range(at, at + own.prompt.stop - own.prompt.start)
        at = first + part.num_tokens - 1
        logit_rows += range(at, at + own.sample.stop - own.sample.start)
        rows.append(own)
        row_start = own.sample.stop
    # The i-th token of a sequence's part has key index start + i. That is its position, too, except in trees.
    counts = query_starts[1:] - query_starts[:-1]
    keys = np.arange(query_starts[-1], dtype=np.int32) + np.repeat(starts - query_starts[:-1], counts)
    block_tables = [cache.block_table(part.sequence.id) for part in plan]
    positions, ancestors = _trees(plan, drafts, keys, query_starts)
    batch = ForwardBatch(
        token_ids=np.concatenate(token_ids),
        positions=positions,
        slots=_slots(keys, counts, block_tables, cache.block_size),
        query_starts=query_starts,
        context_lengths=starts,
        block_tables=block_tables,
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


def _slots(keys: np.ndarray, counts: np.ndarray, block_tables: list[np.ndarray], block_size: int) -> np.ndarray:
    """Slot of each token [T] int64, from its key index and its sequence's table."""
    sizes = np.array([len(table) for table in block_tables])
    offsets = np.repeat(np.cumsum(sizes) - sizes, counts)
    blocks = np.concatenate(block_tables)[offsets + keys // block_size]
    return blocks * np.int64(block_size) + keys % block_size


def _trees(
    plan: list[ScheduledSequence], drafts: list[Draft | None], keys: np.ndarray, query_starts: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray | None]]:
    """Positions [T], by depth within trees, and ancestor masks where a draft is no chain."""
    positions, ancestors = keys, []
    for index, (part, draft) in enumerate(zip(plan, drafts, strict=True)):
        if draft is None or draft.is_chain:
            ancestors.append(None)
            continue
        if positions is keys:
            positions = keys.copy()
        end = query_starts[index + 1]
        positions[end - len(draft) : end] = draft.depths() + positions[end - len(draft) - 1]
        ancestors.append(ancestor_mask(draft, num_before=part.num_tokens))
    return positions, ancestors


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
    owner = np.repeat(np.arange(len(plan)), [own.sample.stop - own.prompt.start for own in rows])  # [M] each row's own
    filters = [(p.temperature, p.top_p, p.min_p) for p in (s.params for s in sequences)]
    temperature, top_p, min_p = np.array(filters, dtype=np.float32).T[:, owner]
    wanted = [s.params.logprobs for s in sequences if s.params.logprobs is not None]
    logprob_ids = None
    for sequence, own in zip(sequences, rows, strict=True):
        count = own.prompt.stop - own.prompt.start
        if count:  # these rows report on the prompt's own next token; nobody reads what they would sample
            if logprob_ids is None:
                logprob_ids = np.full(len(owner), -1, dtype=np.int32)
            at = _first_prompt_row(sequence) + 1
            logprob_ids[own.prompt] = sequence.tokens.view()[at : at + count]
            temperature[own.prompt] = 0.0
            wanted.append(sequence.params.prompt_logprobs or 0)
    return RowSampling(
        temperature=temperature,
        top_k=np.array([s.params.top_k for s in sequences], dtype=np.int32)[owner],
        top_p=top_p,
        min_p=min_p,
        seed=np.array([s.request.seed for s in sequences], dtype=np.uint64)[owner],
        stream=np.array([s.index for s in sequences], dtype=np.uint32)[owner],
        position=positions,
        purpose=np.full(len(positions), SAMPLE, dtype=np.uint32),
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
