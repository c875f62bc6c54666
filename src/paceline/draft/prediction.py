"""Predicted outputs: a request that says what its output will resemble is drafted from that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.draft.alignment import Alignment
from paceline.draft.check import check_list
from paceline.draft.wrapper import DrafterWrapper
from paceline.interfaces import Drafter
from paceline.params import PREDICTION
from paceline.types import Draft, RequestView

_LEAST_REACH = 0.25  # of a node to be drafted: a quarter to a seventh are worth the same


class PredictionDrafter(DrafterWrapper):
    """Drafts what comes next in a request's prediction; where that is not known, and for others, asks another drafter.

    A chain along the prediction (Alignment) is longer the longer it has been right: n tokens that were as expected give
    the next one the chance n / (n + 1). The other drafter gets at most `max_draft_tokens` nodes, and its name is this
    one's: what it does alone stays as it is. Source: OpenAI's predicted outputs, of which the mechanism is not public.
    """

    def __init__(self, other: Drafter, *, max_draft_tokens: int) -> None:
        super().__init__(other)
        self._max_draft_tokens = max_draft_tokens
        self._alignments: dict[str, Alignment] = {}

    @property
    def members(self) -> tuple[str, ...]:
        return (*super().members, PREDICTION)

    def propose(self, views: Sequence[RequestView], budgets: Sequence[int]) -> list[Draft | None]:
        if not any(view.params.prediction for view in views):
            return super().propose(views, budgets)
        drafts = [self._draft(view, budget) for view, budget in zip(views, budgets, strict=True)]
        left = [i for i, view in enumerate(views) if drafts[i] is None and view.params.drafting.method != PREDICTION]
        if left:
            nodes = [min(budgets[i], self._max_draft_tokens) for i in left]
            proposals = super().propose([views[i] for i in left], nodes)
            check_list(proposals, drafter=self.name, count=len(left))
            for i, draft in zip(left, proposals, strict=True):
                drafts[i] = draft
        return drafts

    def release(self, request_id: str) -> None:
        self._alignments.pop(request_id, None)
        super().release(request_id)

    def _draft(self, view: RequestView, budget: int) -> Draft | None:
        if not view.params.prediction:
            return None
        alignment = self._alignments.get(view.request_id)
        if alignment is None:
            alignment = self._alignments[view.request_id] = Alignment(np.array(view.params.prediction, dtype=np.int32))
        alignment.extend(view.token_ids[view.prompt_length + alignment.num_tokens :].tolist())
        if not alignment.evidence:
            return None
        chance = alignment.evidence / (alignment.evidence + 1)
        token_ids = alignment.expected(min(budget, int(math.log(_LEAST_REACH) / math.log(chance))))
        if not token_ids:
            return None
        draft = Draft.chain(token_ids, source=PREDICTION)
        return replace(draft, confidence=np.full(len(draft), chance))
