"""Passes built by hand, for measurements of a runner without an engine around it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.interfaces import Runner
from paceline.types import ForwardBatch, RowSampling

_CHUNK = 256  # tokens of one pass where nobody asked for a length


def chain_pass(token_ids: np.ndarray, *, context: int, block_size: int, all_rows: bool = True) -> ForwardBatch:
    """The tokens [T] int32 that follow `context` computed ones; K/V lies in the first blocks of the pool.

    Every row's logits are wanted, or none's.
    """
    count = len(token_ids)
    keys = np.arange(context, context + count)
    return ForwardBatch(
        token_ids=token_ids,
        positions=keys.astype(np.int32),
        slots=keys.astype(np.int64),
        query_starts=np.array([0, count], dtype=np.int32),
        context_lengths=np.array([context], dtype=np.int32),
        block_tables=[np.arange(-(-(context + count) // block_size), dtype=np.int32)],
        ancestors=[None],
        logit_rows=np.arange(count if all_rows else 0, dtype=np.int32),
    )


def fill_context(runner: Runner, token_ids: np.ndarray) -> None:
    """Computes the K/V of token_ids [T] int32 into the first blocks of the pool, in chunks."""
    fill_blocks(runner, token_ids, np.arange(-(-len(token_ids) // runner.kv.block_size), dtype=np.int32))


def fill_blocks(runner: Runner, token_ids: np.ndarray, table: np.ndarray) -> None:
    """Computes the K/V of token_ids [T] int32 into the blocks of a table [blocks] int32, in chunks."""
    size = runner.kv.block_size
    for start in range(0, len(token_ids), _CHUNK):
        chunk = token_ids[start : start + _CHUNK]
        batch = chain_pass(chunk, context=start, block_size=size, all_rows=False)
        keys = np.arange(start, start + len(chunk))
        slots = table[keys // size] * np.int64(size) + keys % size
        runner.forward(replace(batch, slots=slots, block_tables=[table[: keys[-1] // size + 1]]))


def greedy(positions: np.ndarray) -> RowSampling:
    """Plain greedy sampling of rows whose tokens get these positions [M] uint32."""
    rows = len(positions)
    return RowSampling(
        temperature=np.zeros(rows, dtype=np.float32),
        top_k=np.zeros(rows, dtype=np.int32),
        top_p=np.ones(rows, dtype=np.float32),
        min_p=np.zeros(rows, dtype=np.float32),
        seed=np.zeros(rows, dtype=np.uint64),
        stream=np.zeros(rows, dtype=np.uint32),
        position=positions,
        purpose=np.zeros(rows, dtype=np.uint32),
    )
