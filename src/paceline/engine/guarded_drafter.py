"""A drafter whose mistakes cost drafts, not requests: what a server wants, where a plug-in's author wants the error."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.draft.check import check_draft
from paceline.errors import PacelineWarning
from paceline.interfaces import Drafter
from paceline.types import Draft, RequestView, Verdict


class GuardedDrafter(Drafter):
    """Passes everything on to a drafter, except its errors: these are counted, and the first one is a PacelineWarning.

    A step whose drafter fails goes on without drafts, and the drafter forgets the requests in it, as if they had been
    preempted: what it kept of them may be half of something.
    """

    def __init__(self, drafter: Drafter, *, vocab_size: int, chains_only: bool) -> None:
        self.name = drafter.name
        self.hidden_layers = drafter.hidden_layers
        self.note = drafter.note
        self.num_successors = drafter.num_successors
        self.num_errors = 0
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._chains_only = chains_only

    @property
    def members(self) -> tuple[str, ...]:
        return self._drafter.members

    def propose(self, views: Sequence[RequestView], budgets: Sequence[int]) -> list[Draft | None]:
        try:
            drafts = self._drafter.propose(views, budgets)
            for draft, budget in zip(drafts, budgets, strict=True):
                if draft is not None:
                    check_draft(
                        draft,
                        drafter=self.name,
                        budget=budget,
                        vocab_size=self._vocab_size,
                        chains_only=self._chains_only,
                    )
            return list(drafts)
        except Exception as error:
            self._note(error)
            self._forget(views)
            return [None] * len(views)

    def observe(
        self,
        views: Sequence[RequestView],
        drafts: Sequence[Draft | None],
        verdicts: Sequence[Verdict | None],
        *,
        hidden: Mapping[int | str, Any],
        starts: np.ndarray,
        successors: Sequence[np.ndarray | None],
    ) -> None:
        try:
            self._drafter.observe(views, drafts, verdicts, hidden=hidden, starts=starts, successors=successors)
        except Exception as error:
            self._note(error)
            self._forget(views)

    def release(self, request_id: str) -> None:
        try:
            self._drafter.release(request_id)
        except Exception as error:
            self._note(error)

    def close(self) -> None:
        self._drafter.close()

    def _forget(self, views: Sequence[RequestView]) -> None:
        for view in views:
            self.release(view.request_id)

    def _note(self, error: Exception) -> None:
        self.num_errors += 1
        if self.num_errors == 1:
            warnings.warn(
                f"drafter {self.name!r} failed ({type(error).__name__}: {error}): its drafts of such steps are left "
                "out, and later errors only counted.",
                PacelineWarning,
                stacklevel=2,
            )
