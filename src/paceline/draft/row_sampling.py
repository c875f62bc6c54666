"""Sampling a draft's next tokens as the target would: the request's parameters, its history, its noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.sampling.noise import DRAFT, SAMPLE, purpose_word
from paceline.sampling.processors import PenaltyState, RowAdjustments, allowed_mask, pack_adjustments
from paceline.types import Adjustments, Draft, RequestView, RowSampling, TokenMap


class SamplingState:
    """What a request's parameters do to its next rows, kept up to date with its known tokens.

    eos_ids: the tokens that min_tokens bans.
    """

    def __init__(self, view: RequestView, *, eos_ids: frozenset[int], vocab_size: int) -> None:
        prompt = view.token_ids[: view.prompt_length]
        self.penalties = PenaltyState(view.params, prompt, eos_ids=eos_ids, vocab_size=vocab_size)
        self.allowed = allowed_mask(view.params, vocab_size=vocab_size)  # [ceil(V/8)] uint8, None = all tokens
        self._num_noted = view.prompt_length

    def follow(self, token_ids: np.ndarray) -> None:
        """Takes note of the known tokens [known] that are new."""
        if self.penalties.active:
            self.penalties.append(token_ids[self._num_noted :].tolist())
        self._num_noted = len(token_ids)


@dataclass(frozen=True, slots=True)
class NextRow:
    """The row that a draft's next token is sampled from."""

    view: RequestView
    state: SamplingState
    drafted: np.ndarray | list[int]  # [k], the draft on the way to it


def sample_next(
    rows: Sequence[NextRow], *, rule_needs_law: bool, token_map: TokenMap | None = None, num_candidates: int = 0
) -> RowSampling:
    """How each row is drawn: with the very noise that the target uses, which makes the two agree most often. Where the
    rule wants to know what the tokens were sampled from, the laws are asked for and the words are the draft's own.

    token_map: the target's ids of a model that has others. num_candidates: of each row, to be told with their scores.
    """
    params = [row.view.params for row in rows]
    if rule_needs_law:
        purposes = [purpose_word(DRAFT, row.view.attempt) for row in rows]
    else:
        purposes = [purpose_word(SAMPLE)] * len(rows)
    return RowSampling(
        temperature=np.array([p.temperature for p in params], dtype=np.float32),
        top_k=np.array([p.top_k for p in params], dtype=np.int32),
        top_p=np.array([p.top_p for p in params], dtype=np.float32),
        min_p=np.array([p.min_p for p in params], dtype=np.float32),
        seed=np.array([row.view.seed for row in rows], dtype=np.uint64),
        stream=np.array([row.view.stream for row in rows], dtype=np.uint32),
        position=np.array([len(row.view.token_ids) + len(row.drafted) for row in rows], dtype=np.uint32),
        purpose=np.array(purposes, dtype=np.uint32),
        adjustments=_adjustments(rows),
        allowed=_allowed([row.state.allowed for row in rows]),
        token_map=token_map,
        num_candidates=num_candidates,
        want_laws=rule_needs_law,
    )


def _adjustments(rows: Sequence[NextRow]) -> Adjustments | None:
    """Bias, bans and penalties of each row, with what is drafted so far as history."""
    if not any(row.state.penalties.active for row in rows):
        return None
    adjusted: list[RowAdjustments | None] = []
    for row in rows:
        if row.state.penalties.active:
            num_output = len(row.view.token_ids) - row.view.prompt_length
            drafted = Draft.chain(row.drafted, source="")
            adjusted.append(row.state.penalties.rows(drafted, num_output=num_output)[-1])
        else:
            adjusted.append(None)
    return pack_adjustments(adjusted)


def _allowed(masks: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """[M, ceil(V/8)] bit masks, or None when no request restricts its tokens."""
    given = next((mask for mask in masks if mask is not None), None)
    if given is None:
        return None
    everything = np.full_like(given, 0xFF)
    return np.stack([everything if mask is None else mask for mask in masks])
