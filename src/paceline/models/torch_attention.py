"""Attention over the paged K/V pool: what each request of a pass reads is planned once, then run for every layer.

Shapes: T tokens of the pass, R requests of a group, n query tokens of each (padded to the most), S keys, L layers,
KV heads of keys, G query heads for each of them, D width of a head. Query heads lie in the order [G, KV]: those of
one K/V head then fold into the query dimension without a copy of K, V or the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from paceline.types import ForwardBatch

FEW_TOKENS = 16  # up to here query heads are folded, and requests share a call
LONG_CONTEXT = 1024  # keys from which reading one request's in place is cheaper than gathering them with others'


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What does not change from pass to pass."""

    num_heads: int
    block_size: int
    scale: float  # multiplies q.k
    softcap: float | None  # scores become cap * tanh(score / cap)


class AttentionPlan:
    """Attention of the layers that share a window, for one pass; pool [L, slots, 2, KV, D] holds keys, then values."""

    def __init__(self, batch: ForwardBatch, pool: torch.Tensor, shape: AttentionShape, *, window: int | None) -> None:
        reads = [
            _reads(batch, r, window=window, block_size=shape.block_size) for r in range(len(batch.context_lengths))
        ]
        self._groups = [
            _group(members, pool, shape, num_tokens=len(batch.token_ids))
            for members in _together(reads, block_size=shape.block_size)
        ]
        self._shape = shape

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """queries [T, H, D]; returns [T, H * D]."""
        if len(self._groups) == 1:
            return _attend(self._groups[0], layer, queries, self._shape)
        out = queries.new_empty((len(queries), queries.shape[1] * queries.shape[2]))
        for group in self._groups:
            out.index_copy_(0, group.rows, _attend(group, layer, queries, self._shape))
        return out


@dataclass(frozen=True, slots=True)
class _Reads:
    """What one request reads: the keys of some of its blocks."""

    start: int  # its first token in the pass
    num_tokens: int
    table: np.ndarray  # [B] the blocks
    seen: np.ndarray  # [n, S] bool, from the first key of the first block to the last own token

    @property
    def consecutive(self) -> bool:
        return bool(np.all(np.diff(self.table) == 1))


def _reads(batch: ForwardBatch, request: int, *, window: int | None, block_size: int) -> _Reads:
    start, stop = int(batch.query_starts[request]), int(batch.query_starts[request + 1])
    num_tokens, context = stop - start, int(batch.context_lengths[request])
    positions = batch.positions[start:stop]
    # A context key's index is its position, so what lies behind every query's window need not be read
    first = 0 if window is None else min(max(0, int(positions.min()) - window + 1), context)
    first_block = first // block_size
    first = first_block * block_size
    seen = np.ones((num_tokens, context + num_tokens - first), dtype=bool)
    ancestors = batch.ancestors[request]
    seen[:, context - first :] = np.tri(num_tokens, dtype=bool) if ancestors is None else ancestors
    if window is not None:
        key_positions = np.concatenate([np.arange(first, context), positions])
        seen &= key_positions > positions[:, None] - window
    table = np.asarray(batch.block_tables[request])[first_block : -(-(context + num_tokens) // block_size)]
    return _Reads(start=start, num_tokens=num_tokens, table=table, seen=seen)


def _together(reads: Sequence[_Reads], *, block_size: int) -> list[list[_Reads]]:
    """Requests that share a call: few query tokens each, and less than twice the blocks of the smallest of them."""
    alone: list[list[_Reads]] = []
    shared: dict[int, list[_Reads]] = {}
    for r in reads:
        if r.num_tokens > FEW_TOKENS or (len(r.table) * block_size > LONG_CONTEXT and r.consecutive):
            alone.append([r])
        else:
            shared.setdefault(len(r.table).bit_length(), []).append(r)
    return alone + list(shared.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """One call of attention in each layer."""

    num_requests: int
    rows: torch.Tensor  # [valid] tokens of the pass, in the order of the output
    padded_rows: torch.Tensor | None  # [R * n] tokens of the pass; None = all of them in order
    valid: torch.Tensor | None  # [valid] places among R * n that are no padding; None = all
    keys: Sequence[torch.Tensor]  # L views [1, KV, S, D] of the pool; empty where blocks are gathered
    values: Sequence[torch.Tensor]
    pools: Sequence[torch.Tensor]  # L times [blocks, block_size * 2 * KV * D]
    blocks: torch.Tensor  # [R * B] blocks to gather, where there are no views
    bias: torch.Tensor | None  # [R, 1, n * G or n, S], 0 where a key is seen, else -inf; None = all are seen
    causal: bool  # the keys are the queries' own, so that no bias is needed
    folded: bool


def _group(members: Sequence[_Reads], pool: torch.Tensor, shape: AttentionShape, *, num_tokens: int) -> _Group:
    """The keys of a single request in consecutive blocks are views; others are gathered, padded to the longest."""
    num_layers, _, _, num_kv_heads, width = pool.shape
    n = max(m.num_tokens for m in members)
    num_blocks = max(len(m.table) for m in members)
    view = len(members) == 1 and members[0].consecutive
    num_keys = members[0].seen.shape[1] if view else num_blocks * shape.block_size
    seen = np.zeros((len(members), n, num_keys), dtype=bool)
    rows = np.empty((len(members), n), dtype=np.int64)
    blocks = np.empty((len(members), num_blocks), dtype=np.int64)
    for i, m in enumerate(members):
        seen[i, : m.num_tokens, : m.seen.shape[1]] = m.seen
        seen[i, m.num_tokens :, 0] = True  # padding must see something, or its softmax is 0 / 0
        rows[i] = m.start + np.minimum(np.arange(n), m.num_tokens - 1)
        blocks[i, : len(m.table)] = m.table
        blocks[i, len(m.table) :] = m.table[-1]
    valid = np.flatnonzero(np.arange(n) < np.array([[m.num_tokens] for m in members]))
    folded = n <= FEW_TOKENS
    causal = view and not folded and num_keys == n and bool(np.array_equal(seen[0], np.tri(n, dtype=bool)))
    flat_rows = torch.from_numpy(rows.reshape(-1))
    bias = None
    if not causal and not seen.all():
        repeated = np.repeat(seen, shape.num_heads // num_kv_heads, axis=1) if folded else seen
        bias = torch.from_numpy(np.where(repeated, np.float32(0), np.float32(-np.inf))[:, None])
        bias = bias.to(pool.device, pool.dtype)
    keys, values = (), ()
    if view:
        slot = int(blocks[0, 0]) * shape.block_size
        by_kind = pool[:, slot : slot + num_keys].permute(2, 0, 3, 1, 4).unsqueeze(2)  # [2, L, 1, KV, S, D]
        keys, values = by_kind[0].unbind(0), by_kind[1].unbind(0)
    return _Group(
        num_requests=len(members),
        rows=flat_rows[valid].to(pool.device),
        padded_rows=None if np.array_equal(rows.reshape(-1), np.arange(num_tokens)) else flat_rows.to(pool.device),
        valid=None if len(valid) == rows.size else torch.from_numpy(valid).to(pool.device),
        keys=keys,
        values=values,
        pools=() if view else pool.view(num_layers, -1, shape.block_size * 2 * num_kv_heads * width).unbind(0),
        blocks=torch.from_numpy(blocks.reshape(-1)).to(pool.device),
        bias=bias,
        causal=causal,
        folded=folded,
    )


def _attend(group: _Group, layer: int, queries: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    _, num_heads, width = queries.shape
    if group.keys:
        k, v = group.keys[layer], group.values[layer]
        num_kv_heads = k.shape[1]
    else:
        gathered = group.pools[layer].index_select(0, group.blocks)
        num_kv_heads = gathered.shape[1] // (shape.block_size * 2 * width)
        gathered = gathered.view(group.num_requests, -1, 2, num_kv_heads, width)
        k, v = gathered[:, :, 0].transpose(1, 2), gathered[:, :, 1].transpose(1, 2)  # [R, KV, S, D]
    if group.padded_rows is not None:
        queries = queries.index_select(0, group.padded_rows)
    if group.folded:  # [R, KV, n * G, D]
        q = queries.reshape(group.num_requests, -1, num_kv_heads, width).transpose(1, 2)
    else:  # [G, KV, n, D], one request
        q = queries.view(len(queries), -1, num_kv_heads, width).permute(1, 2, 0, 3)
        k, v = k.expand(len(q), -1, -1, -1), v.expand(len(q), -1, -1, -1)
    if shape.softcap is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.bias, is_causal=group.causal, scale=shape.scale)
    else:
        out = _soft_capped(q, k, v, group, scale=shape.scale, softcap=shape.softcap)
    out = out.transpose(1, 2) if group.folded else out.permute(2, 0, 1, 3)
    out = out.reshape(-1, num_heads * width)
    return out if group.valid is None else out.index_select(0, group.valid)


def _soft_capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: _Group, *, scale: float, softcap: float
) -> torch.Tensor:
    scores = torch.tanh((q @ k.transpose(2, 3)).float() * (scale / softcap)) * softcap
    if group.causal:
        unseen = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    elif group.bias is not None:
        scores = scores + group.bias
    return torch.softmax(scores, dim=-1).to(v.dtype) @ v
