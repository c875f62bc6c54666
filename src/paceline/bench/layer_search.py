"""Which layers to keep: leaves out one after another, each time the one that costs least agreement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.bench.layer_costs import LayerCosts

_PATIENCE = 6  # layers left out without a better speed-up before the search ends


@dataclass(frozen=True, slots=True)
class Subset:
    """Some of a model's layers, and what they are worth."""

    layers: tuple[int, ...]
    agreement: float
    speedup: float
    draft_length: int  # at which the speed-up is reached


def search(evaluate: Callable[[tuple[int, ...]], float], *, num_layers: int, costs: LayerCosts) -> Subset:
    """The best subset on the way from all layers to few. evaluate: a subset's agreement.

    Losses only grow as layers go, mostly, so a layer is measured again only while its last known loss is the least
    (lazy greedy, Minoux 1978): a few measurements a layer instead of one for each that is left. A model of one layer
    has no subset.
    """
    assert num_layers > 1, "one layer cannot be left out"
    kept, last_known = tuple(range(num_layers)), dict.fromkeys(range(num_layers), 2.0)  # better than any: not measured
    best: Subset | None = None
    while len(kept) > 1 and (best is None or len(best.layers) - len(kept) < _PATIENCE):
        measured: set[int] = set()
        while (layer := max(kept, key=lambda i: last_known[i])) not in measured:
            last_known[layer] = evaluate(_without(kept, layer))
            measured.add(layer)
        kept = _without(kept, layer)
        speedup, length = costs.speedup(last_known[layer], num_layers=len(kept))
        if best is None or speedup > best.speedup:
            best = Subset(kept, last_known[layer], speedup, length)
    assert best is not None, "one layer at least was left out"
    return best


def _without(layers: tuple[int, ...], layer: int) -> tuple[int, ...]:
    return tuple(i for i in layers if i != layer)
