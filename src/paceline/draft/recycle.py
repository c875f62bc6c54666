"""Token recycling: what the target thought likely after some words, it will think again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.draft.successor_rows import Seen
from paceline.draft.successors import SuccessorTable, can_save
from paceline.errors import ConfigError
from paceline.interfaces import Drafter
from paceline.types import Draft, Observation, RequestView, Verdict

LEAST_REACH = 0.15  # less likely nodes cost more than they bring, where a pass over 8 rows takes half more
LEAST_OFFERED = 0.08  # the same where a controller knows what rows cost
_NOTHING = np.zeros(0, dtype=np.int32)


class RecycleDrafter(Drafter):
    """Proposes the likeliest paths through a table of the target's latest successors of each token and pair of tokens.

    The table is filled from every row that the target samples, also after nodes that were rejected, from prompts, and
    from what was written in steps of which it was not told.
    All requests share it, and it stays when they are over; those without speculation leave nothing there, or a plain
    run would tell the answers to the run that it is compared with. How often a successor is right is counted by its
    rank and the kind of its row; these rates rank the paths and are the confidence of the nodes.

    vocab_size: the target's. chain: propose only the likeliest path, for rules that take no trees. least_reach: the
    chance with which a node must be reached to be proposed. table: a file that `close` writes; read here if it is
    there. fingerprint: of the tokenizer, for which a file is good.
    Raises ConfigError for a file that is damaged, or of another tokenizer or vocabulary, or that could not be written.
    Source: Luo et al. 2024 (arXiv 2408.08696); pairs, prompts and rates are ours (docs/design-notes.md).
    """

    name = "recycle"
    remembers = True
    catches_up = True
    num_successors = 8

    def __init__(
        self,
        *,
        vocab_size: int,
        chain: bool = False,
        least_reach: float = LEAST_REACH,
        table: str | Path | None = None,
        fingerprint: str = "",
    ) -> None:
        self._chain = chain
        self._least_reach = least_reach
        self._path = None if table is None else Path(table)
        self._fingerprint = fingerprint
        self._table = SuccessorTable(vocab_size=vocab_size, width=self.num_successors)
        if self._path is not None:
            if not can_save(self._path):
                raise ConfigError(
                    f"table must be a file in a folder that can be written to; got {str(self._path)!r}: create the "
                    "folder, or give another name."
                )
            if self._path.exists():
                self._table.load(self._path, fingerprint=fingerprint)
        self._known: dict[str, int] = {}  # how much of each request's text is in the table

    def propose(self, views: Sequence[RequestView], budgets: Sequence[int]) -> list[Draft | None]:
        for view in views:
            self._read(view)
        return [self._grow(*_last_two(v.token_ids), budget) for v, budget in zip(views, budgets, strict=True)]

    def observe(self, step: Observation) -> None:
        for i, view in enumerate(step.views):
            if view.params.speculates:
                self._read(view)
                self._known[view.request_id] += len(step.emitted(i))
        seen = map(_seen, step.views, step.drafts, step.verdicts, step.successors)
        self._table.rows.learn([found for found in seen if found is not None])

    def release(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    def close(self) -> None:
        """Saves the table to its file, whole or not at all. Raises ConfigError if that cannot be written."""
        if self._path is not None:
            self._table.save(self._path, fingerprint=self._fingerprint)

    def _read(self, view: RequestView) -> None:
        """What was written since the request's last step that was observed; at first its prompt."""
        known = self._known.get(view.request_id, 0)
        if known < len(view.token_ids):
            self._table.read_text(view.token_ids[max(0, known - 2) :])
            self._known[view.request_id] = len(view.token_ids)

    def _grow(self, before: int, root: int, budget: int) -> Draft | None:
        tokens, parents, confidence = self._table.rows.grow(
            before, root, budget, least_reach=self._least_reach, chain=self._chain
        )
        return Draft(tokens, parents, confidence=confidence, source=self.name) if len(tokens) else None


def _last_two(token_ids: np.ndarray) -> tuple[int, int]:
    """The last token and the one before it, -1 where there is none."""
    return int(token_ids[-2]) if len(token_ids) > 1 else -1, int(token_ids[-1])


def _seen(view: RequestView, draft: Draft | None, verdict: Verdict | None, said: np.ndarray | None) -> Seen | None:
    if verdict is None or said is None or not view.params.speculates:
        return None
    nodes = (_NOTHING, _NOTHING) if draft is None else (draft.token_ids, draft.parents)
    return Seen(*_last_two(view.token_ids), *nodes, verdict.path, verdict.final_token, said)
