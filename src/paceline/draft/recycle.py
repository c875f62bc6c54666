"""Token recycling: what the target thought likely after some words, it will think again."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.draft.successors import SuccessorTable, can_save
from paceline.errors import ConfigError
from paceline.interfaces import Drafter
from paceline.types import Draft, Observation, RequestView, Verdict

LEAST_REACH = 0.15  # less likely nodes cost more than they bring, where a pass over 8 rows takes half more
LEAST_OFFERED = 0.08  # the same where a controller knows what rows cost
_MOST_PENDING = 16  # steps that wait to be learned from
_Seen = tuple[int, int, Draft | None, Verdict, np.ndarray]  # last two tokens, what became of the draft, and successors
_Candidate = tuple[float, int, int, float, list[int], list[float], int]


class RecycleDrafter(Drafter):
    """Proposes the likeliest paths through a table of the target's latest successors of each token and pair of tokens.

    The table is filled from every row that the target samples, also after nodes that were rejected, and from prompts.
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
        self._read: set[str] = set()  # requests whose prompts are in the table
        self._pending: list[list[_Seen]] = []  # steps since anybody asked: quicker learned from together

    def propose(self, views: Sequence[RequestView], budgets: Sequence[int]) -> list[Draft | None]:
        self._learn()
        return [self._grow(*_last_two(v.token_ids), budget) for v, budget in zip(views, budgets, strict=True)]

    def observe(self, step: Observation) -> None:
        for view in step.views:
            if view.request_id not in self._read and view.params.speculates:
                self._read.add(view.request_id)
                self._learn()
                self._table.read_text(view.token_ids)
        self._pending.append(
            [
                (*_last_two(view.token_ids), draft, verdict, said)
                for view, draft, verdict, said in zip(
                    step.views, step.drafts, step.verdicts, step.successors, strict=True
                )
                if verdict is not None and said is not None and view.params.speculates
            ]
        )
        if len(self._pending) == _MOST_PENDING:
            self._learn()

    def release(self, request_id: str) -> None:
        self._read.discard(request_id)

    def close(self) -> None:
        """Saves the table to its file, whole or not at all. Raises ConfigError if that cannot be written."""
        self._learn()
        if self._path is not None:
            self._table.save(self._path, fingerprint=self._fingerprint)

    def _grow(self, before: int, root: int, budget: int) -> Draft | None:
        """The `budget` nodes that are likeliest to be reached, best first."""
        look, rates = self._table.look, self._table.rates
        tokens: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        # Candidates: -path probability, parent, rank among the parent's successors; then the parent's path probability,
        # successors, their rates and its token. A candidate brings in the next rank and its own first successor.
        said, kind = look(before, root)
        heap: list[_Candidate] = [(-rates[kind][0], -1, 0, 1.0, said, rates[kind], root)] if said[0] >= 0 else []
        while heap and len(tokens) < budget and -heap[0][0] >= self._least_reach:
            minus_reach, parent, rank, above, said, own, before = heapq.heappop(heap)
            node, token = len(tokens), said[rank]
            tokens.append(token)
            parents.append(parent)
            confidence.append(own[rank])
            if not self._chain and rank + 1 < len(said) and said[rank + 1] >= 0:
                heapq.heappush(heap, (-above * own[rank + 1], parent, rank + 1, above, said, own, before))
            below, kind = look(before, token)
            if below[0] >= 0:
                heapq.heappush(heap, (minus_reach * rates[kind][0], node, 0, -minus_reach, below, rates[kind], token))
        if not tokens:
            return None
        return Draft(
            token_ids=np.array(tokens, dtype=np.int32),
            parents=np.array(parents, dtype=np.int32),
            confidence=np.array(confidence),
            source=self.name,
        )

    def _learn(self) -> None:
        pending, self._pending = self._pending, []
        for step in pending:
            self._learn_from(step)

    def _learn_from(self, step: list[_Seen]) -> None:
        dropped: list[tuple[int, int, list[int]]] = []  # before, token, what the target said would follow
        accepted: list[tuple[int, int, list[int]]] = []
        for previous, root, draft, verdict, said in step:
            tokens, before = [root], [previous]
            if draft is not None:
                tokens += draft.token_ids.tolist()
                before += [tokens[parent + 1] for parent in draft.parents.tolist()]
            path = [0, *(1 + node for node in verdict.path)]
            for row, following in zip(path, [*(tokens[row] for row in path[1:]), verdict.final_token], strict=True):
                self._table.count(before[row], tokens[row], following)
            on_path = set(path)
            for row, entry in enumerate(zip(before, tokens, said.tolist(), strict=True)):
                (accepted if row in on_path else dropped).append(entry)
        self._table.write_few([*dropped, *accepted])  # of a token's rows in one pass, the one in the text counts


def _last_two(token_ids: np.ndarray) -> tuple[int, int]:
    """The last token and the one before it, -1 where there is none."""
    return int(token_ids[-2]) if len(token_ids) > 1 else -1, int(token_ids[-1])
