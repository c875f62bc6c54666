"""Passes written by hand, for tests of runners."""

from __future__ import annotations

import numpy as np

from paceline.interfaces import Runner
from paceline.types import ForwardBatch

BLOCK_SIZE = 4
VOCAB_SIZE = 97


def make_batch(
    requests: list[dict],
    *,
    logit_rows: np.ndarray | None = None,
    hidden_layers: tuple = (),
    layers: tuple[int, ...] | None = None,
    block_size: int = BLOCK_SIZE,
) -> ForwardBatch:
    """Packs requests: each has tokens, context, table, and optionally ancestors and depths."""
    tokens, positions, slots, starts = [], [], [], [0]
    for r in requests:
        n = len(r["tokens"])
        keys = r["context"] + np.arange(n)
        table = np.asarray(r["table"])
        tokens.append(np.asarray(r["tokens"], dtype=np.int32))
        positions.append(r["context"] + np.asarray(r.get("depths", np.arange(n)), dtype=np.int32))
        slots.append(table[keys // block_size].astype(np.int64) * block_size + keys % block_size)
        starts.append(starts[-1] + n)
    return ForwardBatch(
        token_ids=np.concatenate(tokens),
        positions=np.concatenate(positions).astype(np.int32),
        slots=np.concatenate(slots),
        query_starts=np.array(starts, dtype=np.int32),
        context_lengths=np.array([r["context"] for r in requests], dtype=np.int32),
        block_tables=[np.asarray(r["table"], dtype=np.int32) for r in requests],
        ancestors=[r.get("ancestors") for r in requests],
        logit_rows=np.arange(starts[-1], dtype=np.int32) if logit_rows is None else logit_rows,
        hidden_layers=hidden_layers,
        layers=layers,
    )


def run_in_chunks(runner: Runner, tokens: np.ndarray, table: list[int], sizes: list[int]) -> np.ndarray:
    """Logits of all tokens, computed in passes of the given sizes."""
    logits, done = [], 0
    for size in sizes:
        batch = make_batch([{"tokens": tokens[done : done + size], "context": done, "table": table}])
        logits.append(runner.forward(batch).logits)
        done += size
    assert done == len(tokens)
    return np.concatenate(logits)


def random_tokens(length: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).astype(np.int32)
