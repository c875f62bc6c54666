"""Trees of a draft model's guesses: the tokens that come next to winning a row's race are drafted, too."""

from __future__ import annotations

import numpy as np

from paceline.cache.manager import CacheManager
from paceline.draft.draft_pass import Candidates, DraftJob
from paceline.draft.row_sampling import NextRow
from paceline.types import Draft, ForwardBatch


class DraftTree:
    """One request's tree as it grows, level by level.

    A node's children are the best candidates of its row. The nodes most likely to be reached make the draft; those
    among them whose row is not known yet are the next level. A pass computes a level together with all nodes that have
    a row already, whose K/V it could not leave to the cache: there every key is seen by every node.
    """

    def __init__(self, job: DraftJob, *, width: int, budget: int, least_reach: float) -> None:
        """budget: nodes. least_reach: of a node that is worth drafting. The root's row is job.candidates."""
        self.job = job
        self._width, self._budget, self._least_reach = width, budget, least_reach
        self._tokens: list[int] = []  # the target's ids, of all nodes so far
        self._parents: list[int] = []
        self._chances: list[float] = []
        self._reach: list[float] = []
        self.computed: list[int] = []  # nodes that have a row, parents first
        self.level: list[int] = []  # nodes that are to get one
        assert job.candidates is not None
        self._branch(-1, job.candidates)
        self._choose()

    @property
    def num_rows(self) -> int:
        """Tokens of the next pass; 0 = the tree is complete."""
        return len(self.computed) + len(self.level) if self.level else 0

    def grow(self, rows: list[Candidates]) -> None:
        """Takes the rows of the level."""
        for node, candidates in zip(self.level, rows, strict=True):
            self._branch(node, candidates)
        self.computed += self.level
        self._choose()

    def next_rows(self) -> list[NextRow]:
        """The rows of the level, each after the path to its node."""
        return [NextRow(self.job.view, self.job.state.sampling, self._path(node)) for node in self.level]

    def part(self) -> Draft:
        """The nodes of the next pass."""
        return self._draft([*self.computed, *self.level], source="")

    def draft(self, source: str) -> Draft | None:
        best = sorted(self._best())
        return self._draft(best, source=source) if best else None

    def _branch(self, parent: int, candidates: Candidates) -> None:
        reach = self._reach[parent] if parent >= 0 else 1.0
        for token_id, chance in zip(candidates.ids[: self._width], candidates.chances.tolist(), strict=False):
            self._tokens.append(token_id)
            self._parents.append(parent)
            self._chances.append(chance)
            self._reach.append(reach * chance)

    def _best(self) -> list[int]:
        """The nodes of the draft; a parent comes before its children, which it is at least as likely as."""
        likely = [node for node, reach in enumerate(self._reach) if reach >= self._least_reach]
        return sorted(likely, key=self._reach.__getitem__, reverse=True)[: self._budget]

    def _path(self, node: int) -> list[int]:
        """Tokens [k] from the root's child to the node."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self._tokens[node])
            node = self._parents[node]
        return tokens[::-1]

    def _choose(self) -> None:
        done, room = set(self.computed), self._budget - 1 - len(self.computed)  # the last node needs no row
        self.level = sorted([node for node in self._best() if node not in done][: max(room, 0)])

    def _draft(self, nodes: list[int], *, source: str) -> Draft:
        places = {-1: -1, **{node: place for place, node in enumerate(nodes)}}
        return Draft(
            token_ids=np.array([self._tokens[node] for node in nodes], dtype=np.int32),
            parents=np.array([places[self._parents[node]] for node in nodes], dtype=np.int32),
            confidence=np.array([self._chances[node] for node in nodes]),
            source=source,
        )


def next_trees(trees: list[DraftTree], max_num_tokens: int) -> list[DraftTree]:
    """Trees whose next level is computed in this pass."""
    chosen, room = [], max_num_tokens
    for tree in trees:
        if 0 < tree.num_rows <= room:
            chosen.append(tree)
            room -= tree.num_rows
    return chosen


def pack_trees(trees: list[DraftTree], own_ids: list[np.ndarray], cache: CacheManager) -> ForwardBatch:
    """One packed pass over the parts of trees, own_ids being the model's tokens of each; a level's rows are wanted."""
    counts = np.array([tree.num_rows for tree in trees])
    ends = np.cumsum(counts)
    context = [tree.job.num_computed for tree in trees]
    parts = [tree.part() for tree in trees]
    ids = [tree.job.view.request_id for tree in trees]
    return ForwardBatch(
        token_ids=np.concatenate(own_ids),
        positions=np.concatenate([n - 1 + part.depths() for n, part in zip(context, parts, strict=True)]),
        slots=np.concatenate([cache.slots(i, n, int(c)) for i, n, c in zip(ids, context, counts, strict=True)]),
        query_starts=np.concatenate([[0], ends]).astype(np.int32),
        context_lengths=np.array(context, dtype=np.int32),
        block_tables=[cache.block_table(i) for i in ids],
        ancestors=[part.ancestors() for part in parts],
        logit_rows=np.concatenate(
            [np.arange(end - len(tree.level), end, dtype=np.int32) for end, tree in zip(ends, trees, strict=True)]
        ),
    )
