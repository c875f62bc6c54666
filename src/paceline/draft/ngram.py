"""Prompt lookup: what followed the last words when they were written before is likely to follow them again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.interfaces import Drafter
from paceline.types import Draft, RequestView


class NgramDrafter(Drafter):
    """Proposes what followed the latest earlier occurrence of the longest suffix of max_ngram down to min_ngram tokens.

    Nothing is kept between calls: a vectorised search over 32k tokens costs less than keeping an index of them.
    Source: prompt lookup decoding (Saxena 2023), in transformers as prompt_lookup_num_tokens.
    """

    name = "ngram"
    catches_up = True

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2) -> None:
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram

    def propose(self, views: Sequence[RequestView], budgets: Sequence[int]) -> list[Draft | None]:
        drafts: list[Draft | None] = []
        for view, budget in zip(views, budgets, strict=True):
            start = self._find(view.token_ids)
            if start is None:
                drafts.append(None)
                continue
            # Where the continuation reaches the text's end it goes on with its own copy, so a repetition is extended.
            followed = view.token_ids[start : start + budget]
            drafts.append(Draft.chain(np.resize(followed, budget), source=self.name))
        return drafts

    def _find(self, token_ids: np.ndarray) -> int | None:
        """Index of the token that followed the best earlier occurrence of the suffix; None without one."""
        last = len(token_ids) - 1
        ends = np.flatnonzero(token_ids[:last] == token_ids[last])  # where an earlier occurrence may end
        best = None
        for length in range(1, min(self._max_ngram, last) + 1):
            if length > 1:
                ends = ends[ends >= length - 1]
                ends = ends[token_ids[ends - length + 1] == token_ids[last - length + 1]]
            if len(ends) == 0:
                break
            if length >= self._min_ngram:
                best = int(ends[-1]) + 1
        return best
