"""How much to draft: a constant, or what the measured costs and chances say is worth its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.control.acceptance import Acceptance
from paceline.control.cost import PassCosts
from paceline.control.guard import Guard
from paceline.types import Draft, Load, Observation, RequestView

_ASKING_SHARE = 0.01  # of the time that may go into asking for drafts that come to nothing
_MOST_SKIPPED = 32  # steps between two tries
_PLAIN_EVERY = 256  # steps after which one is made plainly, so that its price stays known
_RATE = 0.03  # weight of the newest step in averages: about the last 30 count, and
_GAIN_RATE = 0.12  # of the newest draft of a request
_FREE_TRIES = 8  # drafts of a request before it is judged
_GUARD_PASSES = 10  # over one row, that speculation may cost on top of its share of the time
_MARGIN = 1.05  # by which a node must be worth more than it costs: chances are estimates


class FixedLength:
    """Every request drafts the same number of nodes in every step, or as many as its limit allows."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_speculative_tokens = num_speculative_tokens

    def plan(self, views: Sequence[RequestView], limits: Sequence[int], load: Load) -> list[int]:
        return [min(limit, self._num_speculative_tokens) for limit in limits]

    def select(
        self, views: Sequence[RequestView], drafts: Sequence[Draft | None], load: Load, *, seconds: float
    ) -> list[Draft | None]:
        """Whatever was drafted."""
        return list(drafts)

    def observe(self, step: Observation) -> None:
        """A fixed length learns nothing."""

    def release(self, request_id: str) -> None:
        """Nor does it remember anybody."""


@dataclass(slots=True)
class _Record:
    """What asking for one request's drafts brings of late."""

    tries: int = 0
    gain: float = 0.0  # seconds that a draft's nodes save beyond their own, before the time to draft them
    skipped: int = 0  # steps since the last try

    def note(self, gain: float) -> None:
        self.tries, self.skipped = self.tries + 1, 0
        self.gain += max(1 / self.tries, _GAIN_RATE) * (gain - self.gain)


class CostPolicy:
    """Verifies the nodes that bring more tokens for their time than the step would otherwise, and asks for drafts only
    where they have been worth the asking.

    A pass over n more rows takes C(n) seconds more, and brings as many more tokens as the sum of their chances to be
    reached. The nodes of all requests of a step compete: the likeliest n are taken, with the n that maximises that sum
    minus rate * C(n), where the rate is the tokens a second that the engine makes of late, plain decoding's at least:
    time that goes into a poor node is taken from steps that would use it better. n = 0 is plain decoding.

    Where the drafts of a request save less than it takes to draft them, it is asked about once in a while only, as
    often as _ASKING_SHARE of the time allows. The guard bounds the loss where all these estimates are wrong. Drafts
    with a law are verified whole, for which of their sampled nodes are kept may not depend on what they are.
    """

    def __init__(self, costs: PassCosts, *, acceptance: Acceptance | None = None, guard: Guard | None = None) -> None:
        self.costs = costs
        self.acceptance = acceptance or Acceptance()
        self.guard = guard or Guard(budget_seconds=_GUARD_PASSES * costs.seconds(1))
        self._requests: dict[str, _Record] = {}
        self._speedup = 1.0  # of steps over plain ones, lately
        self._seconds_a_draft = 0.0  # of one request's draft, lately
        self._since_plain = 0
        self._proposed: dict[str, Draft] = {}  # of this step, as they came
        self._drafting_seconds = 0.0
        self._load = Load(0, 0)

    def plan(self, views: Sequence[RequestView], limits: Sequence[int], load: Load) -> list[int]:
        """Nodes that each request may draft, at most its limit; 0 = it is not asked."""
        self._begin(load)
        self._since_plain += 1
        if self._since_plain > _PLAIN_EVERY or self._seconds_a_draft * len(views) > self.guard.allowance:
            return [0] * len(views)
        every = self._steps_between_tries(load)
        planned = []
        for view, limit in zip(views, limits, strict=True):
            own = self._requests.setdefault(view.request_id, _Record())
            own.skipped += 1
            pays = own.tries < _FREE_TRIES or own.gain > self._seconds_a_draft
            planned.append(limit if pays or own.skipped >= every else 0)
        return planned

    def select(
        self, views: Sequence[RequestView], drafts: Sequence[Draft | None], load: Load, *, seconds: float
    ) -> list[Draft | None]:
        """The nodes of the drafts that are worth their time. seconds: that it took to draft them."""
        self._drafting_seconds = seconds
        if views:
            self._seconds_a_draft += _GAIN_RATE * (seconds / len(views) - self._seconds_a_draft)
        self._proposed = {v.request_id: d for v, d in zip(views, drafts, strict=True) if d is not None and len(d)}
        fixed_rows = sum(len(draft) for draft in self._proposed.values() if draft.law is not None)
        nodes: list[tuple[float, int, int]] = []  # -reach, draft, node: a node's parent comes before it
        for index, (view, draft) in enumerate(zip(views, drafts, strict=True)):
            if draft is not None and draft.law is None:
                reach = self.acceptance.reach(view.request_id, draft)
                nodes += [(-chance, index, node) for node, chance in enumerate(reach)]
        nodes.sort()
        kept: list[list[int]] = [[] for _ in views]
        gains = [0.0] * len(views)
        rate = self._rate(load)
        for minus_reach, index, node in nodes[: self._best_count(nodes, load, fixed_rows, rate)]:
            kept[index].append(node)
            gains[index] -= minus_reach / rate
        price = self._extra_seconds(load, fixed_rows + sum(map(len, kept))) / max(1, sum(map(len, kept)))
        for index, view in enumerate(views):
            self._requests.setdefault(view.request_id, _Record()).note(gains[index] - price * len(kept[index]))
        return [
            draft if draft is None or draft.law is not None else draft.only(sorted(own)) if own else None
            for draft, own in zip(drafts, kept, strict=True)
        ]

    def observe(self, step: Observation) -> None:
        """Learns from a step: chances, costs, and what speculation gained."""
        num_tokens, num_nodes = 0, 0
        for i, view in enumerate(step.views):
            emitted = step.emitted(i)
            num_tokens += len(emitted)
            draft = step.drafts[i]
            num_nodes += 0 if draft is None else len(draft)
            proposed = self._proposed.get(view.request_id)
            if proposed is not None and emitted:
                self.acceptance.observe(view.request_id, proposed, emitted)
        load = self._load
        if not load.num_sequences or load.rows != load.num_sequences:
            return  # a prompt's tokens are in it, whose price is another
        self.costs.observe(load.rows + num_nodes, load.keys, step.seconds)
        if not num_nodes:
            self._since_plain = 0
        plain = self.costs.seconds(load.rows, load.keys) / load.num_sequences * num_tokens
        # What the pass should have taken: a neighbour's hiccups are not speculation's losses
        taken = self.costs.seconds(load.rows, load.keys) + self._extra_seconds(load, num_nodes) + self._drafting_seconds
        self.guard.note(taken, plain_seconds=plain)
        self._speedup += _RATE * (min(plain / taken, 8.0) - self._speedup)
        self._begin(Load(0, 0))

    def release(self, request_id: str) -> None:
        """The request is over or preempted."""
        self._requests.pop(request_id, None)
        self.acceptance.release(request_id)

    def _begin(self, load: Load) -> None:
        self._load, self._proposed, self._drafting_seconds = load, {}, 0.0

    def _rate(self, load: Load) -> float:
        """Tokens a second that the engine makes in steps of this size."""
        return max(1.0, self._speedup) * load.num_sequences / self.costs.seconds(load.rows, load.keys)

    def _extra_seconds(self, load: Load, num_nodes: int) -> float:
        each = load.keys // max(1, load.rows)
        more = self.costs.seconds(load.rows + num_nodes, load.keys + each * num_nodes)
        return more - self.costs.seconds(load.rows, load.keys)

    def _best_count(self, nodes: Sequence[tuple[float, int, int]], load: Load, fixed_rows: int, rate: float) -> int:
        """How many of the nodes, likeliest first, are worth most together."""
        best, best_value, tokens = 0, 0.0, 0.0
        before, allowance = self._extra_seconds(load, fixed_rows), self.guard.allowance
        for count, (minus_reach, _, _) in enumerate(nodes, 1):
            seconds = self._extra_seconds(load, fixed_rows + count)
            if seconds > allowance:
                break
            tokens -= minus_reach
            value = tokens - _MARGIN * rate * (seconds - before)
            if value > best_value:
                best, best_value = count, value
        return best

    def _steps_between_tries(self, load: Load) -> int:
        """Steps between two drafts that come to nothing, so that they take no more than their share of the time."""
        share = self._seconds_a_draft * load.num_sequences / self.costs.seconds(load.rows, load.keys)
        return max(1, min(_MOST_SKIPPED, round(share / _ASKING_SHARE)))
