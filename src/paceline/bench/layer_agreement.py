"""How often some of a model's layers write what all of them write, measured as drafting uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.control.passes import fill_blocks, greedy
from paceline.errors import CacheError
from paceline.interfaces import Runner
from paceline.types import ForwardBatch

_PASS_TOKENS = 256  # of one measuring pass


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the answer that the model wrote to it greedily."""

    token_ids: np.ndarray  # [known] int32
    prompt_length: int


class LayerAgreement:
    """Compares the layers' next tokens with the answers, token by token.

    An answer is cut into windows of one K/V block. The layers compute a window's tokens after the exact K/V of all
    that comes before it, as a draft grows from exact K/V; the runner's block_size is the longest draft that this
    stands for. Takes the runner's whole K/V pool. Raises CacheError if it is too small for the texts.
    """

    def __init__(self, runner: Runner, texts: Sequence[Text]) -> None:
        self._runner = runner
        size = runner.kv.block_size
        num_windows = _PASS_TOKENS // size
        first, tables = num_windows, []  # the first blocks take what the windows write
        for text in texts:
            count = -(-len(text.token_ids) // size)
            tables.append(np.arange(first, first + count, dtype=np.int32))
            first += count
        if first > runner.kv.num_blocks:
            raise CacheError(
                f"the texts take {first} K/V blocks, the cache has {runner.kv.num_blocks}: raise --kv-cache-memory, or "
                "lower --limit or --max-tokens."
            )
        for text, table in zip(texts, tables, strict=True):
            fill_blocks(runner, text.token_ids[:-1], table)
        windows = [w for text, table in zip(texts, tables, strict=True) for w in _windows(text, table, size)]
        self._passes = [
            _pack(windows[start : start + num_windows], size) for start in range(0, len(windows), num_windows)
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens that are compared."""
        return sum(len(expected) for _, expected in self._passes)

    def __call__(self, layers: Sequence[int]) -> float:
        """Share of the answers' tokens that the layers would have written."""
        agreeing = 0
        for batch, expected in self._passes:
            positions = batch.positions[batch.logit_rows].astype(np.uint32) + np.uint32(1)
            output = self._runner.forward(replace(batch, layers=tuple(layers)), greedy(positions))
            assert output.token_ids is not None
            agreeing += int((output.token_ids == expected).sum())
        return agreeing / self.num_tokens


@dataclass(frozen=True, slots=True)
class _Window:
    """Tokens of one block whose next tokens are to be guessed."""

    token_ids: np.ndarray  # [n + 1] int32, the last one is only guessed
    context: int
    table: np.ndarray  # [blocks] int32, of the context
    first_row: int  # among the window's tokens, the first whose next token belongs to the answer


def _windows(text: Text, table: np.ndarray, size: int) -> list[_Window]:
    windows = []
    first = text.prompt_length - 1  # its next token is the answer's first
    for start in range(first // size * size, len(text.token_ids) - 1, size):
        own = text.token_ids[start : start + size + 1]
        windows.append(_Window(own, start, table[: start // size], max(0, first - start)))
    return windows


def _pack(windows: Sequence[_Window], size: int) -> tuple[ForwardBatch, np.ndarray]:
    """One pass over windows, each in a block of its own, and the tokens [M] that its rows are to give."""
    counts = np.array([len(window.token_ids) - 1 for window in windows])
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    block = np.repeat(np.arange(len(windows)), counts)
    contexts = np.array([window.context for window in windows], dtype=np.int32)
    first_rows = np.array([window.first_row for window in windows])
    batch = ForwardBatch(
        token_ids=np.concatenate([window.token_ids[:-1] for window in windows]),
        positions=(contexts[block] + within).astype(np.int32),
        slots=block * np.int64(size) + within,
        query_starts=starts,
        context_lengths=contexts,
        block_tables=[np.append(window.table, np.int32(i)) for i, window in enumerate(windows)],
        ancestors=[None] * len(windows),
        logit_rows=np.flatnonzero(within >= first_rows[block]).astype(np.int32),
    )
    return batch, np.concatenate([window.token_ids[1 + window.first_row :] for window in windows])
