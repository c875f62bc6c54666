"""Adjustments of raw logits before temperature: bias, bans, min_tokens, penalties, allowed tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from paceline.params import SamplingParams
from paceline.types import Adjustments, Draft, RowSampling


class RowAdjustments(NamedTuple):
    """What types.Adjustments holds for one row: ids [K] int32, the rest [K] float32."""

    ids: np.ndarray
    bias: np.ndarray
    scale: np.ndarray
    penalty: np.ndarray


class _Table(NamedTuple):
    """What is known of the tokens that a row adjusts; each has one place in all four arrays."""

    ids: np.ndarray  # [K] int32
    bias: np.ndarray  # [K] float32
    scale: np.ndarray  # [K] float32
    uses: np.ndarray  # [K] int32, occurrences in the output

    @classmethod
    def over(cls, token_ids: Iterable[int]) -> _Table:
        ids = np.fromiter(token_ids, dtype=np.int32)
        size = len(ids)
        return cls(ids, np.zeros(size, np.float32), np.ones(size, np.float32), np.zeros(size, np.int32))

    def with_token(self, token_id: int) -> _Table:
        return _Table(*(np.concatenate(parts) for parts in zip(self, _Table.over([token_id]), strict=True)))


class PenaltyState:
    """What one sequence's bias, bans, min_tokens and penalties do to its next rows, kept up to date token by token.

    active: False when no row of this sequence is adjusted any more: rows() and append() can be skipped for good.
    Repetition counts prompt and output, presence and frequency the output. What rows() returns is valid until the
    next append().
    """

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Iterable[int], *, eos_ids: Iterable[int], vocab_size: int
    ) -> None:
        self._params = params
        self._num_output = 0
        endings = [t for t in (*eos_ids, *params.stop_token_ids) if t < vocab_size] if params.min_tokens else []
        prompt = set(np.asarray(prompt_token_ids).tolist()) if params.repetition_penalty != 1.0 else set()
        known = dict.fromkeys([*params.logit_bias, *params.banned_token_ids, *endings, *prompt])
        self._places = {token_id: place for place, token_id in enumerate(known)}
        self._table = _Table.over(known)
        self._table.bias[self._at(params.logit_bias)] = list(params.logit_bias.values())
        self._table.bias[self._at(params.banned_token_ids)] = -np.inf
        self._table.scale[self._at(prompt)] = params.repetition_penalty
        self._endings = self._at(endings)
        self._lasting = params.has_penalties or bool(params.logit_bias or params.banned_token_ids)
        self.active = self._lasting or params.min_tokens > 0

    def append(self, token_ids: Iterable[int]) -> None:
        """Takes note of output tokens."""
        for token_id in token_ids:
            self._num_output += 1
            if self._params.has_penalties:
                if token_id not in self._places:
                    self._places[token_id] = len(self._places)
                    self._table = self._table.with_token(token_id)
                place = self._places[token_id]
                self._table.uses[place] += 1
                self._table.scale[place] = self._params.repetition_penalty
        self.active = self._lasting or self._num_output < self._params.min_tokens

    def rows(self, draft: Draft | None, *, num_output: int) -> list[RowAdjustments]:
        """Adjustments of the root's row and of each node's, every one with its own path as history.

        num_output is the number of output tokens before the draft.
        """
        assert num_output == self._num_output, "rows() and append() disagree on the output's length"
        tables, lengths = [self._table], [num_output]
        if draft is not None:
            for token_id, parent in zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True):
                table = tables[parent + 1]
                tables.append(self._after(table, token_id) if self._params.has_penalties else table)
                lengths.append(lengths[parent + 1] + 1)
        return [self._finish(table, length) for table, length in zip(tables, lengths, strict=True)]

    def _after(self, table: _Table, token_id: int) -> _Table:
        """The table of a row whose path goes on with token_id."""
        place = self._places.get(token_id)
        if place is None:  # not in the history, but perhaps on this path
            num_known = len(self._places)
            drafted = table.ids[num_known:].tolist()
            place = num_known + (drafted.index(token_id) if token_id in drafted else len(drafted))
        if place == len(table.ids):
            table = table.with_token(token_id)
        else:
            table = table._replace(scale=table.scale.copy(), uses=table.uses.copy())
        table.scale[place] = self._params.repetition_penalty
        table.uses[place] += 1
        return table

    def _finish(self, table: _Table, num_output: int) -> RowAdjustments:
        params = self._params
        bias = table.bias
        if num_output < params.min_tokens:
            bias = bias.copy()
            bias[self._endings] = -np.inf
        penalty = np.where(table.uses > 0, params.presence_penalty + params.frequency_penalty * table.uses, 0.0)
        return RowAdjustments(table.ids, bias, table.scale, penalty.astype(np.float32))

    def _at(self, token_ids: Iterable[int]) -> np.ndarray:
        return np.array([self._places[t] for t in token_ids], dtype=np.int64)


def pack_adjustments(rows: Sequence[RowAdjustments | None]) -> Adjustments:
    """The rows of a pass, one after another; None = a row without adjustments."""
    present = [row for row in rows if row is not None]
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([0 if row is None else len(row.ids) for row in rows], out=offsets[1:])
    empty = RowAdjustments(np.empty(0, np.int32), *(np.empty(0, np.float32) for _ in range(3)))
    ids, bias, scale, penalty = (np.concatenate(parts) for parts in zip(empty, *present, strict=True))
    return Adjustments(offsets=offsets, ids=ids, bias=bias, scale=scale, penalty=penalty)


def allowed_mask(params: SamplingParams, *, vocab_size: int) -> np.ndarray | None:
    """Bit mask of allowed_token_ids as RowSampling.allowed wants it: [ceil(V/8)] uint8; None = all are allowed."""
    return None if params.allowed_token_ids is None else token_mask(params.allowed_token_ids, vocab_size=vocab_size)


def token_mask(token_ids: Iterable[int], *, vocab_size: int) -> np.ndarray:
    """Bit mask [ceil(V/8)] uint8 of some tokens; ids outside the vocabulary have no bit."""
    mask = np.zeros(vocab_size, dtype=bool)
    mask[[token_id for token_id in token_ids if token_id < vocab_size]] = True
    return np.packbits(mask, bitorder="little")


def adjusted_row(logits: np.ndarray, sampling: RowSampling, row: int) -> np.ndarray:
    """Row `row` of logits [M, V] after bias, bans, penalties and mask: [V] float32, a copy only where it changes."""
    z = logits[row]
    changes = sampling.adjustments
    if changes is not None and changes.offsets[row] < changes.offsets[row + 1]:
        span = slice(changes.offsets[row], changes.offsets[row + 1])
        ids, scale = changes.ids[span], changes.scale[span]
        values = z[ids] + changes.bias[span]
        values = np.where(values > 0, values / scale, values * scale) - changes.penalty[span]
        z = z.copy()
        z[ids] = values
    if sampling.allowed is not None:
        allowed = np.unpackbits(sampling.allowed[row], bitorder="little", count=len(z)).view(bool)
        if not allowed.all():
            z = np.where(allowed, z, np.float32(-np.inf))
    return z
