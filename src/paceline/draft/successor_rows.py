"""The rows of a table of successors one by one: what a step looks up, grows into a draft and writes back."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, cast

import numpy as np

from paceline.draft.extension import native

NUM_PAIRS = 1 << 16
MIX = 0x9E3779B1  # odd, so that first tokens spread over all slots, and beyond any vocabulary, so that no keys collide
FIRST, CONFIRMED, CHANGED = 0, 1, 2  # what the last writing of a row did to its best successor
NUM_STATES = 3

_Candidate = tuple[float, int, int, float, list[int], list[float], int]


class Seen(NamedTuple):
    """What a step showed of one request."""

    before: int  # the token before the root, -1 = none
    root: int
    token_ids: np.ndarray  # [N] int32, of the draft's nodes
    parents: np.ndarray  # [N] int32, -1 = root
    path: tuple[int, ...]  # accepted nodes
    final_token: int
    successors: np.ndarray  # [1 + N, width] int32: what the target said would follow the root and each node


class SuccessorRows:
    """Works on the arrays of a SuccessorTable, which describes them, in place. hits and trials count, for each kind of
    row, how often each rank came true, and of how many times; rates [kinds][width] follow from them: how often one is
    right, below 1, and never more than the rank before it, which a few chance hits could make it seem.
    """

    def __init__(
        self, successors: np.ndarray, kinds: np.ndarray, keys: np.ndarray, hits: np.ndarray, trials: np.ndarray
    ) -> None:
        self._width = successors.shape[1]
        self._hits, self._trials = hits, trials
        # One element at a time these are several times faster than arrays.
        self._rows, self._kinds, self._keys = successors.reshape(-1).data, kinds.data, keys.data
        self.rates = [self._rates_of(kind) for kind in range(2 * NUM_STATES)]

    def look(self, before: int, token: int) -> tuple[list[int], int]:
        """Successors [width] of a token after the token `before` it, and the kind of their row.

        It is the pair's where the pair is known, and otherwise the token's.
        """
        key = before * MIX + token
        slot = key & (NUM_PAIRS - 1)
        row = slot if self._keys[slot] == key else token + NUM_PAIRS
        return self._rows[row * self._width : (row + 1) * self._width].tolist(), self._kinds[row]

    def grow(
        self, before: int, root: int, budget: int, *, least_reach: float, chain: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The `budget` nodes that are likeliest to be reached after the root, best first, none with a chance below
        least_reach: token_ids and parents [N] int32, confidence [N]. chain: only the best successor of each."""
        tokens: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        # Candidates: -path probability, parent, rank among the parent's successors; then the parent's path probability,
        # successors, their rates and its token. A candidate brings in the next rank and its own first successor.
        said, kind = self.look(before, root)
        rates = self.rates
        heap: list[_Candidate] = [(-rates[kind][0], -1, 0, 1.0, said, rates[kind], root)] if said[0] >= 0 else []
        while heap and len(tokens) < budget and -heap[0][0] >= least_reach:
            minus_reach, parent, rank, above, said, own, before = heapq.heappop(heap)
            node, token = len(tokens), said[rank]
            tokens.append(token)
            parents.append(parent)
            confidence.append(own[rank])
            if not chain and rank + 1 < len(said) and said[rank + 1] >= 0:
                heapq.heappush(heap, (-above * own[rank + 1], parent, rank + 1, above, said, own, before))
            below, kind = self.look(before, token)
            if below[0] >= 0:
                heapq.heappush(heap, (minus_reach * rates[kind][0], node, 0, -minus_reach, below, rates[kind], token))
        return np.array(tokens, dtype=np.int32), np.array(parents, dtype=np.int32), np.array(confidence, dtype=float)

    def learn(self, step: Sequence[Seen]) -> None:
        """Counts what came true in a step, and writes what the target said: of a pair's or token's rows in it the last
        one counts, those of the texts after those of dropped nodes."""
        dropped: list[tuple[int, int, list[int]]] = []
        accepted: list[tuple[int, int, list[int]]] = []
        for seen in step:
            tokens = [seen.root, *seen.token_ids.tolist()]
            before = [seen.before, *(tokens[parent + 1] for parent in seen.parents.tolist())]
            path = [0, *(1 + node for node in seen.path)]
            for row, following in zip(path, [*(tokens[row] for row in path[1:]), seen.final_token], strict=True):
                self.count(before[row], tokens[row], following)
            on_path = set(path)
            for row, entry in enumerate(zip(before, tokens, seen.successors.tolist(), strict=True)):
                (accepted if row in on_path else dropped).append(entry)
        self._write([*dropped, *accepted])

    def count(self, before: int, token: int, following: int) -> None:
        """Notes what came after a token that came after `before`, to tell how far the row can be trusted."""
        said, kind = self.look(before, token)
        if said[0] >= 0:
            self._trials[kind] += 1.0
            if following in said:
                self._hits[kind, said.index(following)] += 1.0
            self.rates[kind] = self._rates_of(kind)

    def _rates_of(self, kind: int) -> list[float]:
        trials = self._trials[kind].item() + 1.0
        return list(accumulate((hits / trials for hits in self._hits[kind].tolist()), min))

    def _write(self, rows: Sequence[tuple[int, int, list[int]]]) -> None:
        """(before, token, successors [width]) of each."""
        for (before, token), successors in {(before, token): said for before, token, said in rows}.items():
            key = before * MIX + token
            slot = key & (NUM_PAIRS - 1)
            known = self._keys[slot] == key
            self._keys[slot] = key
            self._put(slot, 0, successors, known=known)
        for token, successors in {token: said for _, token, said in rows}.items():
            self._put(token + NUM_PAIRS, NUM_STATES, successors, known=True)

    def _put(self, row: int, first_kind: int, successors: list[int], *, known: bool) -> None:
        at = row * self._width
        old = self._rows[at] if known else -1
        self._kinds[row] = first_kind + (FIRST if old < 0 else CONFIRMED if old == successors[0] else CHANGED)
        self._rows[at : at + self._width] = array("i", successors)


def new_rows(
    successors: np.ndarray, kinds: np.ndarray, keys: np.ndarray, hits: np.ndarray, trials: np.ndarray
) -> SuccessorRows:
    """The extension's where that is built: it does the same, and sooner."""
    if native is None:
        return SuccessorRows(successors, kinds, keys, hits, trials)
    return cast("SuccessorRows", native.SuccessorRows(successors, kinds, keys, hits, trials))
