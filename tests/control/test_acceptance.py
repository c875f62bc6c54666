"""Acceptance: chances that are right on average, whatever drafters claim, and follow a request that changes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paceline.control.acceptance import Acceptance
from paceline.types import Draft


def chain(claims, *, source="a", tokens=None) -> Draft:
    draft = Draft.chain(tokens or [1] * len(claims), source=source)
    return Draft(draft.token_ids, draft.parents, confidence=np.array(claims, float), source=source)


def teach(acceptance: Acceptance, truth, *, steps: int, request: str = "r", source: str = "a", seed: int = 0) -> None:
    """Drafts of three nodes with random claims; a node is right with the chance truth(claim, depth)."""
    rng = random.Random(seed)
    for _ in range(steps):
        claims = [rng.uniform(0.05, 1.0) for _ in range(3)]
        emitted = []
        for depth, claim in enumerate(claims):
            emitted.append(1 if rng.random() < truth(claim, depth) else 2)
            if emitted[-1] == 2:
                break
        acceptance.observe(request, chain(claims, source=source), [*emitted, 3])


@pytest.mark.parametrize(
    "truth",
    [lambda c, d: c, lambda c, d: c * c, lambda c, d: 0.5 * c, lambda c, d: c ** (1 + d), lambda c, d: 0.4],
    ids=["honest", "bold", "twice too bold", "bolder by depth", "of no meaning"],
)
def test_calibrated(truth):
    acceptance = Acceptance()
    teach(acceptance, truth, steps=5000)
    errors = []
    for claim in np.linspace(0.1, 0.95, 18):
        reach = acceptance.reach("another", chain([claim] * 3))
        chances = [reach[0], reach[1] / reach[0], reach[2] / reach[1]]
        errors += [chance - truth(claim, depth) for depth, chance in enumerate(chances)]
    assert np.mean(np.abs(errors)) < 0.07


def test_at_first_claims_are_believed():
    reach = Acceptance().reach("r", chain([0.5, 0.5]))
    assert reach == pytest.approx([0.5, 0.25])
    assert Acceptance().reach("r", Draft.chain([1], source="a")) == pytest.approx([0.5])


def test_drafters_are_told_apart():
    acceptance = Acceptance()
    teach(acceptance, lambda c, d: 0.9, steps=300, source="good")
    teach(acceptance, lambda c, d: 0.05, steps=300, source="bad")
    acceptance.release("r")
    assert acceptance.reach("new", chain([0.5], source="good"))[0] > 0.75
    assert acceptance.reach("new", chain([0.5], source="bad"))[0] < 0.15


def test_a_request_that_differs_from_others():
    acceptance = Acceptance()
    teach(acceptance, lambda c, d: 0.6, steps=500, request="usual")
    teach(acceptance, lambda c, d: 0.05, steps=20, request="hard")
    claims = chain([0.6])
    assert acceptance.reach("hard", claims)[0] < 0.7 * acceptance.reach("usual", claims)[0]
    acceptance.release("hard")
    assert acceptance.reach("hard", claims)[0] == pytest.approx(acceptance.reach("new", claims)[0])


def test_nodes_that_the_text_did_not_reach_are_not_judged():
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.observe("r", chain([0.9, 0.9, 0.9], tokens=[1, 2, 3]), [5, 6])
        acceptance.release("r")
    reach = acceptance.reach("r", chain([0.9, 0.9]))
    assert reach[0] < 0.1
    assert reach[1] / reach[0] == pytest.approx(0.9)


def test_reach_never_rises_along_a_path():
    acceptance = Acceptance()
    teach(acceptance, lambda c, d: 1.0, steps=500)
    reach = acceptance.reach("r", chain([0.2] * 12))
    assert reach == sorted(reach, reverse=True)
    assert reach[0] < 1
