"""How much to draft: a constant, or what the measured costs and chances say is worth its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.control.acceptance import Acceptance
from paceline.control.asking import Asking, Lengths, Stopwatch
from paceline.control.cost import PassCosts
from paceline.control.guard import Guard
from paceline.interfaces import Drafter
from paceline.types import Draft, Load, Observation, RequestView

_ASKING_SHARE = 0.005  # of the time that may go into asking for drafts that come to nothing
_AFTERMATH = 1.5  # times a draft's time: with what choosing, packing, verifying and learning from it take on top
_SLOW_SHARE = 0.1  # of a plain pass: a drafter whose whole budget takes less is asked for all of it
_PLAIN_EVERY = 256  # decoding steps after which one is made plainly, so that its price stays known
_RATE = 0.03  # weight of the newest step in averages: about the last 30 count
_GUARD_PASSES = 10  # over one row, that speculation may cost on top of its share of the time
_MORE_ROWS = (1, 2, 4, 8)  # among which are those that cost least each
_MARGIN = 1.05  # by which a node must be worth more than it costs: chances are estimates


class FixedLength:
    """Every request drafts the same number of nodes in every step, or as many as its limit allows."""

    fixed = True
    rest = 0
    least_reach = 0.0

    def __init__(self, num_speculative_tokens: int) -> None:
        self._num_speculative_tokens = num_speculative_tokens

    def plan(self, views: Sequence[RequestView], limits: Sequence[int], load: Load) -> list[int]:
        return [min(limit, self._num_speculative_tokens) for limit in limits]

    def budgets(
        self, drafter: Drafter, views: Sequence[RequestView], limits: Sequence[int], drafts: Sequence[Sequence[Draft]]
    ) -> list[int]:
        """Every drafter is asked for as many."""
        return list(limits)

    def drafted(
        self, drafter: Drafter, views: Sequence[RequestView], drafts: Sequence[Draft | None], *, seconds: float
    ) -> None:
        """A fixed length has no price."""

    def select(
        self, views: Sequence[RequestView], drafts: Sequence[Draft | None], load: Load, *, seconds: float
    ) -> list[Draft | None]:
        """Whatever was drafted."""
        return list(drafts)

    def observe(self, step: Observation) -> None:
        """A fixed length learns nothing."""

    def passed(self, load: Load, seconds: float) -> None:
        """Nor here."""

    def release(self, request_id: str) -> None:
        """Nor does it remember anybody."""


@dataclass(slots=True)
class _Ask:
    """A slow drafter that is asked in this step for one request."""

    lengths: tuple[Lengths, Lengths]  # the request's own, and that of all
    gains: list[float]  # seconds that its nodes save, by depth; of a drafter that takes whole drafts' time in one sum
    seconds: float = 0.0  # that it took


@dataclass(slots=True)
class _Step:
    """What is known of a step before its pass."""

    load: Load
    proposed: dict[str, Draft] = field(default_factory=dict)  # as they came, by request
    drafting_seconds: float = 0.0  # that count
    told_seconds: float = 0.0  # by the clock, of drafters that were timed one by one
    asks: dict[str, dict[str, _Ask]] = field(default_factory=dict)  # by request and drafter


class CostPolicy:
    """Verifies the nodes that bring more tokens for their time than the step would otherwise, and asks for drafts only
    where they have been worth the asking.

    A pass over n more rows takes C(n) seconds more, and brings as many more tokens as the sum of their chances to be
    reached. The nodes of all requests of a step compete: the likeliest n are taken, with the n that maximises that sum
    minus rate * C(n), where the rate is the tokens a second that the engine makes of late, plain decoding's at least:
    time that goes into a poor node is taken from steps that would use it better. n = 0 is plain decoding.

    Where the drafts of a request save less than it takes to draft them, it is asked about once in a while only, with
    all the others, as often as _ASKING_SHARE of the time allows. Of several drafters slow ones, such as a draft model,
    are asked for as many nodes as save more than they take, judged by what they added of late to what the others knew
    (Asking). The guard bounds the loss where chances are misjudged.

    Drafts with a law are kept whole or not at all, by their length and what became of earlier ones: which of their
    sampled nodes are verified may not depend on what they are.
    """

    fixed = False

    def __init__(self, costs: PassCosts, *, acceptance: Acceptance | None = None, guard: Guard | None = None) -> None:
        self.costs = costs
        self.acceptance = acceptance or Acceptance()
        self.guard = guard or Guard(budget_seconds=_GUARD_PASSES * costs.seconds(1))
        self._speedup = 1.0  # of decoding steps over plain ones, lately
        self._since_plain = 0  # decoding steps
        self._asking = Asking()
        self._stopwatches: dict[str, Stopwatch] = {}  # of each of several drafters; "": of the rest
        self.rest = 0
        self.least_reach = 0.0
        self._step = _Step(Load(0, 0))

    def plan(self, views: Sequence[RequestView], limits: Sequence[int], load: Load) -> list[int]:
        """Nodes that each request may draft, at most its limit; 0 = it is not asked."""
        self._step, self.rest = _Step(load), 0
        if not views or self._since_plain >= _PLAIN_EVERY:
            return [0] * len(views)
        asking = self._asking
        tries_every = asking.waits * self._tries_every(asking.common.seconds / _AFTERMATH, load)
        trying = asking.is_time_to_try(tries_every) or any(
            view.params.prediction and not asking.has_asked(view.request_id) for view in views
        )
        planned, pays = [], False
        allowance = self.guard.allowance
        for view, limit in zip(views, limits, strict=True):
            own = asking.worth(view.request_id)
            pays = pays or own.pays
            asked = (trying or own.pays) and own.seconds <= allowance
            allowance -= own.seconds if asked else 0.0
            planned.append(limit if asked else 0)
        if trying and any(planned):
            asking.tried()
        if any(planned):
            self.least_reach = 0.0 if trying else self._least_reach(load)
        elif not (trying or pays):  # who pays waits for the guard
            self.rest = asking.rest(tries_every)
        return planned

    def budgets(
        self, drafter: Drafter, views: Sequence[RequestView], limits: Sequence[int], drafts: Sequence[Sequence[Draft]]
    ) -> list[int]:
        """Nodes that one of several drafters is asked for: all it can where they take no time to speak of."""
        load, stopwatch = self._step.load, self._stopwatch(drafter)
        plain = self._plain_seconds(load)
        row = self.costs.seconds(load.rows + 1, load.keys) - self.costs.seconds(load.rows, load.keys)
        allowance = self.guard.allowance - self._step.drafting_seconds
        budgets = []
        for view, limit, others in zip(views, limits, drafts, strict=True):
            units, rows = (limit, 1) if drafter.serial else (1, limit)  # nodes, or the draft as a whole
            if not stopwatch.started or len(views) * units * stopwatch.usual < _SLOW_SHARE * plain:
                budgets.append(limit)
                continue
            promised = max((sum(self.acceptance.reach(view.request_id, draft)) for draft in others), default=0.0)
            lengths = self._asking.lengths(view.request_id, drafter.name, promised)
            every = self._tries_every(stopwatch.usual, load)
            price = stopwatch.usual + rows * row  # what is drafted has to be verified
            units = self._asking.length(*lengths, units, seconds_per_node=stopwatch.usual, tries_every=every)
            units = min(units, max(0, int(allowance / price)))
            allowance -= units * price
            budgets.append(units * rows)
            if units:
                asks = self._step.asks.setdefault(view.request_id, {})
                asks[drafter.name] = _Ask(lengths, [0.0] * units)
        return budgets

    def drafted(
        self, drafter: Drafter, views: Sequence[RequestView], drafts: Sequence[Draft | None], *, seconds: float
    ) -> None:
        """Takes the time of one of several drafters; but for that in which a slow one reads a new request's prompt,
        which no later draft has to pay again."""
        step = self._step
        step.told_seconds += seconds
        stopwatch = self._stopwatch(drafter)
        longest = max((len(draft) for draft in drafts if draft is not None), default=0)
        units = len(views) * (max(1, longest) if drafter.serial else 1)
        met = [self._asking.meet(view.request_id, drafter.name) for view in views]
        if drafter.serial and any(met) and not (stopwatch.started and seconds < units * stopwatch.usual):
            return
        counted = stopwatch.counted(seconds, units)
        step.drafting_seconds += counted
        for view in views:
            ask = step.asks.get(view.request_id, {}).get(drafter.name)
            if ask is not None:
                ask.seconds = counted / len(views)

    def select(
        self, views: Sequence[RequestView], drafts: Sequence[Draft | None], load: Load, *, seconds: float
    ) -> list[Draft | None]:
        """What is worth its time of the drafts, which took `seconds`."""
        step, rate = self._step, self._rate(load)
        step.drafting_seconds += self._stopwatch(None).counted(max(0.0, seconds - step.told_seconds), 1)
        step.proposed = {v.request_id: d for v, d in zip(views, drafts, strict=True) if d is not None and len(d)}
        choice = _Choice(self.costs, load, rate=rate, allowance=self.guard.allowance - step.drafting_seconds)
        gains = [0.0] * len(views)  # in seconds
        selected: list[Draft | None] = [None] * len(views)
        nodes: list[tuple[float, int, int]] = []  # -reach, draft, node: a node's parent comes before it
        for index, (view, draft) in enumerate(zip(views, drafts, strict=True)):
            if draft is None:
                continue
            reach = self.acceptance.reach(view.request_id, draft)
            if draft.law is None:
                nodes += [(-chance, index, node) for node, chance in enumerate(reach)]
            elif len(draft) and (gain := choice.take_whole(sum(reach), len(draft), view.num_computed)) > 0:
                selected[index], gains[index] = draft, gain
        nodes.sort()
        contexts = [view.num_computed for view in views]
        best = choice.best_count([(-minus_reach, contexts[index]) for minus_reach, index, _ in nodes])
        price = choice.seconds / best if best else 0.0
        kept: list[list[int]] = [[] for _ in views]
        for minus_reach, index, node in nodes[:best]:
            kept[index].append(node)
            gain = -minus_reach / rate - price
            if not self._credit(views[index].request_id, drafts[index], node, gain):
                gains[index] += gain
        for index, own in enumerate(kept):
            draft = drafts[index]
            if own and draft is not None:
                selected[index] = draft if len(own) == len(draft) else draft.only(sorted(own))
        self._settle(views, gains)
        return selected

    def observe(self, step: Observation) -> None:
        """Learns from a step: chances, costs, and what speculation gained."""
        self._asking.step_over()
        before, self._step = self._step, _Step(Load(0, 0))
        load, drafting_seconds = before.load, before.drafting_seconds
        num_nodes, node_keys = step.nodes_and_keys
        rows, keys, num_accepted = load.rows + num_nodes, load.keys + node_keys, 0
        for i, view in enumerate(step.views):
            emitted, proposed = step.emitted(i), before.proposed.get(view.request_id)
            num_accepted += max(0, len(emitted) - 1)
            if proposed is not None and emitted:
                self.acceptance.observe(view.request_id, proposed, emitted)
        # What the pass should have taken: a neighbour's hiccups are not speculation's losses
        plain = self.costs.seconds(load.rows, load.keys, load.keys)
        extra = self.costs.seconds(rows, keys, load.keys) - plain if num_nodes else 0.0
        saved = num_accepted / load.num_sequences * self._plain_seconds(load) if num_accepted else 0.0
        self.guard.note(step.seconds + drafting_seconds, lost=extra + drafting_seconds - saved)
        if not load.only_decodes:
            return  # a prompt's tokens are in it, whose price is another
        gained = (plain + saved) / (plain + extra + drafting_seconds)
        self._speedup += _RATE * (min(gained, 8.0) - self._speedup)
        self._since_plain = self._since_plain + 1 if num_nodes else 0
        self.costs.observe(rows, keys, load.keys, step.seconds)

    def passed(self, load: Load, seconds: float) -> None:
        """Learns from a step for which nobody was asked."""
        self._asking.step_over()
        if not load.num_sequences:
            return
        self.guard.note(seconds, lost=0.0)
        if load.only_decodes:
            self._since_plain = 0
            self._speedup += _RATE * (1.0 - self._speedup)
            self.costs.observe(load.rows, load.keys, load.keys, seconds)

    def release(self, request_id: str) -> None:
        """The request is over or preempted."""
        self._asking.release(request_id)
        self.acceptance.release(request_id)

    def _credit(self, request_id: str, draft: Draft | None, node: int, gain: float) -> bool:
        """Credits a node to the slow drafter that proposed it first, if one did."""
        asks = self._step.asks.get(request_id)
        if asks is None or draft is None or draft.proposers is None:
            return False
        ask = asks.get(draft.proposers[node][0])
        if ask is None:
            return False
        depth, parent = 0, int(draft.parents[node])
        while parent >= 0:
            depth, parent = depth + 1, int(draft.parents[parent])
        ask.gains[min(depth, len(ask.gains) - 1)] += gain
        return True

    def _settle(self, views: Sequence[RequestView], gains: Sequence[float]) -> None:
        """Notes what asking brought. gains: of each request's nodes, but for those of slow drafters."""
        step = self._step
        slow = sum(ask.seconds for asks in step.asks.values() for ask in asks.values())
        seconds = _AFTERMATH * max(0.0, step.drafting_seconds - slow) / len(views)
        brought = 0.0
        for view, gain in zip(views, gains, strict=True):
            self._asking.meet(view.request_id, "")
            for ask in step.asks.get(view.request_id, {}).values():
                for lengths in ask.lengths:
                    lengths.note(ask.gains)
                gain += max(0.0, sum(ask.gains) - ask.seconds)  # what does not pay is asked less, not the others
            self._asking.worth(view.request_id).note(gain, seconds)
            brought += gain
        self._asking.asked(brought / len(views), seconds)

    def _stopwatch(self, drafter: Drafter | None) -> Stopwatch:
        """Of one of several drafters; None = what is left of the time when theirs is taken off."""
        name = "" if drafter is None else drafter.name
        return self._stopwatches.setdefault(name, Stopwatch(usual=self.costs.seconds(1)))

    def _plain_seconds(self, load: Load) -> float:
        """Of a pass over one token of each sequence that decodes."""
        return self.costs.seconds(load.num_sequences, load.keys, load.keys)

    def _rate(self, load: Load) -> float:
        """Tokens a second that the engine makes in decoding steps of so many sequences."""
        return max(1.0, self._speedup) * load.num_sequences / self._plain_seconds(load)

    def _least_reach(self, load: Load) -> float:
        """Half of what a node must bring where it costs least: chances may be twice what drafters say."""
        seconds = self.costs.seconds
        before = seconds(load.rows, load.keys)
        cheapest = min((seconds(load.rows + more, load.keys) - before) / more for more in _MORE_ROWS)
        return 0.5 * self._rate(load) * cheapest

    def _tries_every(self, seconds: float, load: Load) -> int:
        """Steps between two drafts that come to nothing, so that they take no more than their share of the time."""
        return max(1, round(seconds * load.num_sequences / self._plain_seconds(load) / _ASKING_SHARE))


class _Choice:
    """Which nodes a pass takes on top of its load, in a step in which a second is worth `rate` tokens."""

    def __init__(self, costs: PassCosts, load: Load, *, rate: float, allowance: float) -> None:
        self._costs = costs
        self._rows, self._keys = load.rows, load.keys
        self._before = costs.seconds(load.rows, load.keys)
        self._rate = _MARGIN * rate
        self._allowance = allowance
        self.seconds = 0.0  # that the nodes of best_count add

    def take_whole(self, tokens: float, num_nodes: int, context: int) -> float:
        """Takes nodes that bring so many tokens together, if they are worth it; the seconds that they save, or 0."""
        rows, keys = self._rows + num_nodes, self._keys + num_nodes * context
        seconds = self._costs.seconds(rows, keys) - self._before
        gain = tokens / self._rate - seconds
        if seconds > self._allowance or gain <= 0:
            return 0.0
        self._rows, self._keys, self._before = rows, keys, self._before + seconds
        self._allowance -= seconds
        return gain

    def best_count(self, nodes: Sequence[tuple[float, int]]) -> int:
        """How many of the nodes (chance to be reached, context), likeliest first, are worth most together."""
        cost, before, rate = self._costs.seconds, self._before, self._rate
        best, best_value, tokens = 0, 0.0, 0.0
        rows, keys = self._rows, self._keys
        for count, (reach, context) in enumerate(nodes, 1):
            keys += context
            seconds = cost(rows + count, keys) - before
            if seconds > self._allowance:
                break
            tokens += reach
            value = tokens - rate * seconds
            if value > best_value:
                best, best_value, self.seconds = count, value, seconds
        return best
