"""How likely a drafted node is to be accepted, learned from what became of those before it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.types import Draft

_BINS = 8  # of confidence
_DEPTHS = (0, 1, 2, 3, 3, 4, 4, 4, 5)  # class of each depth below the root's children; the last one for all deeper
_PRIOR = 4.0  # nodes' worth of trust in what a drafter claims
_KEEP = 0.995  # of what is known of a place, for each node there: about the last 200 count
_OWN_PRIOR = 6.0  # nodes' worth of trust that a request is as the others are
_OWN_KEEP = 0.9
_MOST = 0.98  # no node is certain

_Place = tuple[object, int, int]  # who proposed it, class of its depth, bin of its confidence


class Acceptance:
    """Chances of nodes, given that their parents are accepted.

    A node's confidence is the drafter's claim. What became of nodes of the same proposers, at a similar depth and with
    a similar claim, corrects it; so does how the request's own nodes turned out of late, against what was expected of
    them. Nodes are judged by the text that followed, whether they were verified or not, so that a drafter which gets
    nothing today can win it back.
    """

    def __init__(self) -> None:
        self._right: dict[_Place, float] = {}
        self._claimed: dict[_Place, float] = {}
        self._requests: dict[str, list[float]] = {}  # right, expected: of the request's latest nodes

    def reach(self, request_id: str, draft: Draft) -> list[float]:
        """For each node the probability that all nodes down to it are accepted."""
        right, expected = self._requests.get(request_id, (0.0, 0.0))
        tilt = (right + _OWN_PRIOR) / (expected + _OWN_PRIOR)
        reach: list[float] = []
        for place, claim, parent in _places(draft):
            chance = min(_MOST, tilt * self._chance(place, claim))
            reach.append(chance * reach[parent] if parent >= 0 else chance)
        return reach

    def observe(self, request_id: str, draft: Draft, emitted: Sequence[int]) -> None:
        """The draft, as it was proposed, was followed by these tokens."""
        own = self._requests.setdefault(request_id, [0.0, 0.0])
        own[:] = [_OWN_KEEP * value for value in own]
        places = _places(draft)
        for node, _, right in draft.judged(emitted):
            place, claim, _ = places[node]
            own[0] += right
            own[1] += self._chance(place, claim)
            self._claimed[place] = _KEEP * self._claimed.get(place, 0.0) + claim
            self._right[place] = _KEEP * self._right.get(place, 0.0) + right

    def release(self, request_id: str) -> None:
        """The request is over."""
        self._requests.pop(request_id, None)

    def _chance(self, place: _Place, claim: float) -> float:
        claimed = self._claimed.get(place)
        if claimed is None:
            return claim
        # What is off in this bin is off by a factor: claims within a bin differ, too
        return min(1.0, claim * (self._right[place] + _PRIOR * claim) / (claimed + _PRIOR * claim))


def _places(draft: Draft) -> list[tuple[_Place, float, int]]:
    """Of each node its place in the statistics, its claim and its parent."""
    count = len(draft)
    # A sampled node's claim depends on what it is
    claims = draft.claims if draft.law is None else [0.5] * count
    names: Sequence[object] = [(draft.source,)] * count if draft.proposers is None else draft.proposers
    depths: list[int] = []
    places = []
    for claim, name, parent in zip(claims, names, draft.parents.tolist(), strict=True):
        depth = depths[parent] + 1 if parent >= 0 else 0
        depths.append(depth)
        claim = min(1.0, max(1e-3, claim))
        depth_class = _DEPTHS[depth] if depth < len(_DEPTHS) else _DEPTHS[-1]
        places.append(((name, depth_class, min(_BINS - 1, int(claim * _BINS))), claim, parent))
    return places
