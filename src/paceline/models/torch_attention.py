"""Attention over the paged K/V pool: what each request of a pass reads is planned once, then run for every layer.

Shapes: T tokens of the pass, R requests of a group, n query tokens of each (padded to the longest), S keys,
KV heads of keys, G query heads for each of them, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from paceline.types import ForwardBatch

FEW_TOKENS = 16  # up to here the query heads of a K/V head are folded into the query dimension, which is faster


@dataclass(frozen=True, slots=True)
class Group:
    """Requests whose attention is one call: a single one whose keys are a view, or several that are gathered."""

    rows: torch.Tensor  # [valid] tokens of the pass, in the order of the output
    padded_rows: torch.Tensor  # [R * n] tokens of the pass
    valid: torch.Tensor | None  # [valid] places among R * n that are no padding; None = all
    num_requests: int
    slots: slice | None  # keys as a view of the pool
    blocks: torch.Tensor | None  # [R * B] blocks to gather, where the keys are no view
    bias: torch.Tensor | None  # [R, 1, n, S], or [R, 1, n * G, S] where folded; None = all keys are seen
    causal: bool  # the keys are the queries' own, so that no bias is needed
    folded: bool


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the layers of one window attend in this pass."""

    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class _Reads:
    """What one request reads: keys first..last of its sequence."""

    start: int  # its first token in the pass
    num_tokens: int
    first_block: int  # of its block table
    table: np.ndarray  # [B] blocks that hold keys first_block * block_size onwards
    seen: np.ndarray  # [n, S] bool, keys from first_block * block_size to the last own token

    @property
    def consecutive(self) -> bool:
        return bool(np.all(np.diff(self.table) == 1))

    @property
    def few(self) -> bool:
        return self.num_tokens <= FEW_TOKENS


def plan_attention(
    batch: ForwardBatch,
    *,
    window: int | None,
    block_size: int,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionPlan:
    """Groups the requests of a pass: few scattered tokens together, everything else one request a call."""
    reads = [_reads(batch, r, window=window, block_size=block_size) for r in range(len(batch.context_lengths))]
    scattered = [r for r in reads if r.few and not r.consecutive]
    singles = [[r] for r in reads if not r.few or r.consecutive]
    return AttentionPlan(
        tuple(
            _group(members, block_size=block_size, group_size=group_size, dtype=dtype, device=device)
            for members in ([*singles, scattered] if scattered else singles)
        )
    )


def _reads(batch: ForwardBatch, request: int, *, window: int | None, block_size: int) -> _Reads:
    start, stop = int(batch.query_starts[request]), int(batch.query_starts[request + 1])
    num_tokens, context = stop - start, int(batch.context_lengths[request])
    positions = batch.positions[start:stop]
    first = 0 if window is None else min(max(0, int(positions.min()) - window + 1), context)
    first_block = first // block_size
    first = first_block * block_size
    seen = np.ones((num_tokens, context + num_tokens - first), dtype=bool)
    ancestors = batch.ancestors[request]
    seen[:, context - first :] = np.tri(num_tokens, dtype=bool) if ancestors is None else ancestors
    if window is not None:
        key_positions = np.concatenate([np.arange(first, context), positions])  # a context key's index is its position
        seen &= key_positions > positions[:, None] - window
    table = batch.block_tables[request][first_block : -(-(context + num_tokens) // block_size)]
    return _Reads(start=start, num_tokens=num_tokens, first_block=first_block, table=np.asarray(table), seen=seen)


def _group(
    members: Sequence[_Reads], *, block_size: int, group_size: int, dtype: torch.dtype, device: torch.device
) -> Group:
    n = max(m.num_tokens for m in members)
    folded = n <= FEW_TOKENS
    view = len(members) == 1 and members[0].consecutive
    num_blocks = max(len(m.table) for m in members)
    num_keys = members[0].seen.shape[1] if view else num_blocks * block_size
    seen = np.zeros((len(members), n, num_keys), dtype=bool)
    padded_rows = np.empty((len(members), n), dtype=np.int64)
    blocks = np.empty((len(members), num_blocks), dtype=np.int64)
    for i, m in enumerate(members):
        seen[i, : m.num_tokens, : m.seen.shape[1]] = m.seen
        seen[i, m.num_tokens :, 0] = True  # padding must see something, or its softmax is 0 / 0
        padded_rows[i] = m.start + np.minimum(np.arange(n), m.num_tokens - 1)
        blocks[i, : len(m.table)] = m.table
        blocks[i, len(m.table) :] = m.table[-1]
    valid = np.flatnonzero(np.arange(n) < np.array([[m.num_tokens] for m in members]))
    causal = view and not folded and num_keys == n and np.array_equal(seen[0], np.tri(n, dtype=bool))
    slot = int(blocks[0, 0]) * block_size
    return Group(
        rows=torch.from_numpy(padded_rows.reshape(-1)[valid]).to(device),
        padded_rows=torch.from_numpy(padded_rows.reshape(-1)).to(device),
        valid=None if len(valid) == padded_rows.size else torch.from_numpy(valid).to(device),
        num_requests=len(members),
        slots=slice(slot, slot + num_keys) if view else None,
        blocks=None if view else torch.from_numpy(blocks.reshape(-1)).to(device),
        bias=None if causal or seen.all() else _bias(seen, repeats=group_size if folded else 1, dtype=dtype).to(device),
        causal=causal,
        folded=folded,
    )


def _bias(seen: np.ndarray, *, repeats: int, dtype: torch.dtype) -> torch.Tensor:
    """[R, 1, n * repeats, S]: 0 where a key is seen, -inf elsewhere."""
    bias = np.where(seen, np.float32(0), np.float32(-np.inf))
    return torch.from_numpy(np.repeat(bias, repeats, axis=1)[:, None]).to(dtype)


def attend(
    plan: AttentionPlan,
    heads: torch.Tensor,
    pool: torch.Tensor,
    *,
    num_heads: int,
    block_size: int,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of one layer. heads [T, H + 2 KV, D] (q first), pool [slots, 2, KV, D]; returns [T, H * D]."""
    if len(plan.groups) == 1:
        return _attend_group(plan.groups[0], heads, pool, num_heads, block_size, scale, softcap)
    out = heads.new_empty((len(heads), num_heads * heads.shape[2]))
    for group in plan.groups:
        out.index_copy_(0, group.rows, _attend_group(group, heads, pool, num_heads, block_size, scale, softcap))
    return out


def _attend_group(
    group: Group,
    heads: torch.Tensor,
    pool: torch.Tensor,
    num_heads: int,
    block_size: int,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    num_kv_heads, width = pool.shape[2:]
    count = group.num_requests
    if group.blocks is None:
        keys = pool[group.slots][None]
    else:
        by_block = pool.view(-1, block_size * 2 * num_kv_heads * width)
        keys = by_block.index_select(0, group.blocks).view(count, -1, 2, num_kv_heads, width)
    k, v = keys.permute(2, 0, 3, 1, 4)  # each [R, KV, S, D]
    q = heads[:, :num_heads]
    if len(group.padded_rows) != len(heads) or count > 1:
        q = q.index_select(0, group.padded_rows)
    if group.folded:  # [R, KV, n * G, D]
        q = q.reshape(count, -1, num_kv_heads, num_heads // num_kv_heads, width).transpose(1, 2).flatten(2, 3)
    else:  # [1, H, n, D]
        q = q.transpose(0, 1)[None]
    if softcap is None:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=group.bias, is_causal=group.causal, scale=scale, enable_gqa=not group.folded
        )
    else:
        out = _soft_capped(q, k, v, group, scale, softcap)
    if group.folded:
        out = out.unflatten(2, (-1, num_heads // num_kv_heads))  # [R, KV, n, G, D]
    out = out.transpose(1, 2).reshape(-1, num_heads * width)
    return out if group.valid is None else out.index_select(0, group.valid)


def _soft_capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, scale: float, softcap: float
) -> torch.Tensor:
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = torch.tanh((q @ k.transpose(2, 3)).float() * (scale / softcap)) * softcap
    if group.causal:
        unseen = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    elif group.bias is not None:
        scores = scores + group.bias
    return torch.softmax(scores, dim=-1).to(v.dtype) @ v
