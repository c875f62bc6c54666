"""Passes built by hand, for measurements of a runner without an engine around it."""

from __future__ import annotations

import numpy as np

from paceline.interfaces import Runner
from paceline.types import ForwardBatch

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
    """Computes the K/V of token_ids [T] int32, in chunks."""
    for start in range(0, len(token_ids), _CHUNK):
        chunk = token_ids[start : start + _CHUNK]
        runner.forward(chain_pass(chunk, context=start, block_size=runner.kv.block_size, all_rows=False))
