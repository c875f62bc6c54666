"""A draft model whose token ids are the target's: what drafting asks of a vocabulary, answered at no cost."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from paceline.types import RequestView, TokenMap


class DraftVocabulary(Protocol):
    """How a draft model's tokens and the target's belong together. Drafts are always in the target's ids."""

    note: str  # what people should know of it
    size: int  # ids of the target
    token_map: TokenMap | None  # the target's id of each token that the model samples; None = they are the same

    def read(self, view: RequestView) -> np.ndarray | None:
        """The known text in the model's tokens [K] int32, or None where it cannot be read."""
        ...

    def own_id(self, token_id: int) -> int:
        """The model's id of a token that it sampled under the target's id."""
        ...

    def respell(self, view: RequestView, drafted: list[int]) -> list[int]:
        """Drafted tokens as the target would spell their text, where it would take longer ones."""
        ...

    def release(self, request_id: str) -> None:
        """Forgets what was kept for a request."""
        ...


class SharedVocabulary:
    """The same tokens under the same ids; either model may have more of them, to pad its embedding."""

    note = ""

    def __init__(self, *, target_size: int, own_size: int) -> None:
        self.size = target_size
        self._own_size = own_size
        self.token_map = None
        if target_size != own_size:
            ids = np.arange(own_size, dtype=np.int32)
            self.token_map = TokenMap(np.where(ids < target_size, ids, -1).astype(np.int32), target_size)

    def read(self, view: RequestView) -> np.ndarray | None:
        known = view.token_ids
        return known if self._own_size >= self.size or known.max() < self._own_size else None

    def own_id(self, token_id: int) -> int:
        return token_id

    def respell(self, view: RequestView, drafted: list[int]) -> list[int]:
        del view
        return drafted

    def release(self, request_id: str) -> None:
        pass
