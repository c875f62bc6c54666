"""Several drafters at once: their drafts become one tree, and its best nodes are verified."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from paceline.draft.check import check_draft, check_list
from paceline.errors import DraftMismatchError
from paceline.interfaces import Controller, Drafter
from paceline.types import Draft, Observation, RequestView

_PRIOR = 4.0  # nodes' worth of trust in what a drafter claims, before anything is known of it
_KEEP = 0.98  # of what is known of a depth, for each draft that tests it: about the last 50 count
_DEPTHS = 16  # that are told apart
_LEAST_REACH = 0.25  # of a node to be kept: what it costs, and a margin for chances that are a little bold
_LEAST_OFFERED = 0.04  # the same where a controller selects


class HybridDrafter(Drafter):
    """Asks each of several drafters for a draft and keeps the nodes most likely to be reached.

    Nodes with the same path are one. A node's chance, once its parent is accepted, is the confidence that its drafter
    gives it, corrected by how the drafter's confidence at this depth has turned out lately (TrackRecord), so that a
    drafter that earns more gets more of the budget; of several proposers' chances the highest counts. The draft's
    nodes are those with the largest products of chances along their paths, so long as such a product is worth a node.

    The drafters are asked in order, each for as many nodes as the controller says, who has seen what those before it
    drafted. Every drafter is told of the merged draft, whose `proposers` name those whose nodes they are. Drafts with
    a law cannot be merged, which leaves the rule `coupled`. vocab_size: the target's. selects: False where the
    controller does, by what it learns of the nodes: then chances are what the drafters say, and poor nodes stay.
    """

    def __init__(self, drafters: Sequence[Drafter], *, vocab_size: int, selects: bool = True) -> None:
        self.name = "+".join(drafter.name for drafter in drafters)
        self.note = "; ".join(drafter.note for drafter in drafters if drafter.note)
        self.hidden_layers = tuple(dict.fromkeys(layer for drafter in drafters for layer in drafter.hidden_layers))
        self.num_successors = max(drafter.num_successors for drafter in drafters)
        self.catches_up = all(drafter.catches_up for drafter in drafters)
        self._drafters = list(drafters)
        self._records = [TrackRecord() for _ in drafters] if selects else []
        self._controller: Controller | None = None
        self._vocab_size = vocab_size
        self._least_reach = _LEAST_REACH if selects else _LEAST_OFFERED
        self._proposed: dict[str, list[Draft | None]] = {}  # each drafter's own draft, by request, in this step

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(drafter.name for drafter in self._drafters)

    def propose(self, views: Sequence[RequestView], budgets: Sequence[int]) -> list[Draft | None]:
        """The merged draft of each view. Raises DraftMismatchError, naming the drafter whose draft is unusable."""
        self._proposed = {view.request_id: [] for view in views}
        for drafter in self._drafters:
            for view, draft in zip(views, self._ask(drafter, views, budgets), strict=True):
                self._proposed[view.request_id].append(draft)
        return [self._merge(self._proposed[v.request_id], budget) for v, budget in zip(views, budgets, strict=True)]

    def consult(self, controller: Controller) -> None:
        self._controller = controller  # asked about members; those of a member are that one's own affair

    def observe(self, step: Observation) -> None:
        for i, view in enumerate(step.views) if self._records else ():
            emitted = step.emitted(i)
            for record, own in zip(self._records, self._proposed.get(view.request_id, ()), strict=False):
                if own is not None and emitted:
                    record.note(own, emitted)
        self._proposed = {}
        for drafter in self._drafters:
            drafter.observe(step if drafter.num_successors == self.num_successors else _cut(step, drafter))

    def release(self, request_id: str) -> None:
        with ExitStack() as stack:  # one that fails keeps no other from it
            for drafter in self._drafters:
                stack.callback(drafter.release, request_id)

    def close(self) -> None:
        with ExitStack() as stack:
            for drafter in self._drafters:
                stack.callback(drafter.close)

    def _ask(self, drafter: Drafter, views: Sequence[RequestView], budgets: Sequence[int]) -> list[Draft | None]:
        """The drafter's own draft of each view, None where the request takes another's, or the controller none."""
        asked = [i for i, view in enumerate(views) if view.params.drafting.allows(drafter.name)]
        if self._controller is not None and asked:
            before = [[d for d in self._proposed[views[i].request_id] if d is not None] for i in asked]
            limits = [budgets[i] for i in asked]
            planned = self._controller.budgets(drafter, [views[i] for i in asked], limits, before)
            budgets = list(budgets)
            for i, budget in zip(asked, planned, strict=True):
                budgets[i] = min(budgets[i], budget)
            asked = [i for i in asked if budgets[i] > 0]
        drafts: list[Draft | None] = [None] * len(views)
        if not asked:
            return drafts
        start = time.perf_counter()
        own = drafter.propose([views[i] for i in asked], [budgets[i] for i in asked])
        seconds = time.perf_counter() - start
        check_list(own, drafter=drafter.name, count=len(asked))
        for i, draft in zip(asked, own, strict=True):
            drafts[i], budget = draft, budgets[i]
            if draft is None:
                continue
            check_draft(draft, drafter=drafter.name, budget=budget, vocab_size=self._vocab_size, chains_only=False)
            if draft.law is not None:
                raise DraftMismatchError(
                    f"drafter {drafter.name!r} gave a law, which a hybrid's tree cannot keep: leave it out."
                )
        if self._controller is not None:
            self._controller.drafted(drafter, [views[i] for i in asked], own, seconds=seconds)
        return drafts

    def _merge(self, proposals: Sequence[Draft | None], budget: int) -> Draft | None:
        nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node; parents come before their children
        chances: list[float] = []
        names: list[list[str]] = []
        for index, (drafter, draft) in enumerate(zip(self._drafters, proposals, strict=True)):
            if draft is None:
                continue
            places: list[int] = []  # of the draft's own nodes in the merged tree
            own_chances = self._records[index].chances(draft) if self._records else draft.claims
            own = zip(draft.token_ids.tolist(), draft.parents.tolist(), own_chances, strict=True)
            for token, parent, chance in own:
                key = (places[parent] if parent >= 0 else -1, token)
                node = nodes.setdefault(key, len(nodes))
                if node == len(chances):
                    chances.append(chance)
                    names.append([drafter.name])
                else:
                    chances[node] = max(chances[node], chance)
                    if drafter.name not in names[node]:
                        names[node].append(drafter.name)
                places.append(node)
        return self._best(list(nodes), chances, names, budget)

    def _best(
        self, nodes: list[tuple[int, int]], chances: list[float], names: list[list[str]], budget: int
    ) -> Draft | None:
        """The tree of the nodes that are most likely to be reached; None if none is likely enough."""
        reach: list[float] = []
        for (parent, _), chance in zip(nodes, chances, strict=True):
            reach.append(chance * reach[parent] if parent >= 0 else chance)
        least = max(self._least_reach, self._controller.least_reach if self._controller is not None else 0.0)
        kept = [node for node, own in enumerate(reach) if own >= least]
        if not kept:
            return None
        if len(kept) > budget:
            # No node outdoes its parent, and sorting is stable in reverse, too: a node is kept only if its parent is.
            kept = sorted(sorted(kept, key=reach.__getitem__, reverse=True)[:budget])
        new_index = {-1: -1, **{node: index for index, node in enumerate(kept)}}
        return Draft(
            token_ids=np.array([nodes[node][1] for node in kept], dtype=np.int32),
            parents=np.array([new_index[nodes[node][0]] for node in kept], dtype=np.int32),
            confidence=np.array([chances[node] for node in kept]),
            source=self.name,
            proposers=tuple(tuple(names[node]) for node in kept),
        )


def _cut(step: Observation, drafter: Drafter) -> Observation:
    """The step with as many successors as the drafter wants."""
    wanted = drafter.num_successors
    cut = (
        [None if rows is None else rows[:, :wanted] for rows in step.successors] if wanted else [None] * len(step.views)
    )
    # Not by `replace`, which takes longer than all else here
    return Observation(step.views, step.drafts, step.verdicts, step.hidden, step.starts, cut, step.seconds)


class TrackRecord:
    """How a drafter's confidence turns out, by depth: the nodes that were right over those that it had promised.

    Nodes are judged by the text that followed, whether they were verified or not, so a drafter that gets none of the
    budget today can win it back.
    """

    def __init__(self) -> None:
        self._right = [0.0] * _DEPTHS  # 0 = children of the root; the last stands for all deeper ones, too
        self._promised = [0.0] * _DEPTHS
        self._ratios = [1.0] * _DEPTHS

    def chances(self, draft: Draft) -> list[float]:
        """For each node the probability that it is accepted once its parent is."""
        depths: list[int] = []
        result: list[float] = []
        for claim, parent in zip(draft.claims, draft.parents.tolist(), strict=True):
            depth = min(depths[parent] + 1, _DEPTHS - 1) if parent >= 0 else 0
            depths.append(depth)
            chance = claim * self._ratios[depth]
            result.append(chance if chance < 1.0 else 1.0)
        return result

    def note(self, draft: Draft, emitted: Sequence[int]) -> None:
        """The draft was followed by these tokens: children of a node that they reach are right, or wrong."""
        right: dict[int, float] = defaultdict(float)
        promised: dict[int, float] = defaultdict(float)
        claims = draft.claims
        for node, depth, is_right in draft.judged(emitted):
            promised[depth] += claims[node]
            right[depth] += is_right
        for depth in promised:
            at = min(depth, _DEPTHS - 1)
            self._right[at] = _KEEP * self._right[at] + right[depth]
            self._promised[at] = _KEEP * self._promised[at] + promised[depth]
            self._ratios[at] = (self._right[at] + _PRIOR) / (self._promised[at] + _PRIOR)
