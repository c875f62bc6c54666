"""PassCosts: never falling, robust, corrected by what passes take; measuring a runner."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control import cost
from paceline.control.cost import PassCosts, measure
from paceline.testing import ToyModel

CURVE = {1: 5e-3, 2: 5.8e-3, 4: 7.4e-3, 8: 10.6e-3, 16: 17e-3}


def test_between_and_beyond_what_was_measured():
    costs = PassCosts(CURVE, seconds_per_key=1e-6)
    assert costs.seconds(1) == pytest.approx(5e-3)
    assert costs.seconds(3) == pytest.approx(6.6e-3)
    assert costs.seconds(16, 1000) == pytest.approx(18e-3)
    assert costs.seconds(24) == pytest.approx(23.4e-3)
    assert costs.seconds(1000) == pytest.approx(17e-3 + 984 * 0.8e-3)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=12))
def test_it_never_falls(seconds):
    costs = PassCosts({1 << i: own for i, own in enumerate(seconds)})
    curve = [costs.seconds(rows) for rows in range(1, 400)]
    assert curve == sorted(curve)
    assert curve[0] >= seconds[0] * (1 - 1e-9)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.floats(0.3, 3.0), st.integers(0, 99))
def test_it_follows_a_machine_that_has_become_slower_or_faster(factor, seed):
    true, costs, rng = PassCosts(CURVE), PassCosts(CURVE), random.Random(seed)
    for _ in range(600):
        rows = rng.choice([1, 2, 5, 8, 16])
        outlier = 20.0 if rng.random() < 0.05 else 1.0
        costs.observe(rows, 0, 0, true.seconds(rows) * factor * outlier)
    for rows in (1, 4, 16):
        assert costs.seconds(rows) == pytest.approx(factor * true.seconds(rows), rel=0.35)


def test_files():
    costs = PassCosts(CURVE, seconds_per_key=1e-6, seconds_per_context=2e-6)
    again = PassCosts.from_json(costs.as_json())
    assert [again.seconds(rows, 9, 8) for rows in range(1, 99)] == pytest.approx(
        [costs.seconds(rows, 9, 8) for rows in range(1, 99)]
    )


GOOD = {"seconds": {"1": 1.0}, "seconds_per_key": 0.0, "seconds_per_context": 0.0}


@pytest.mark.parametrize(
    "value",
    [
        None, [], {}, *({name: GOOD[name] for name in GOOD if name != missing} for missing in GOOD),
        *(GOOD | {"seconds": seconds} for seconds in (
            {}, 5, {"1": -1}, {"2": 1}, {"a": 1}, {"1": "nan"}, {"1": 1, "9" * 30: 2}, {"1": 5e-324})),
        *(GOOD | {name: own} for name in GOOD if name != "seconds" for own in ("inf", 10**400, -1, None)),
    ],
)  # fmt: skip
def test_other_files(value):
    with pytest.raises(ValueError, match=r"no costs of passes|could not convert|invalid literal"):
        PassCosts.from_json(value)


class Lax(ToyModel):
    """Takes keys of any history: most of a long context are copies."""

    def _in_order(self, slots, *, partial):
        return slots


SIZES = [(64, 2048, 200), (64, 512, 64), (64, 1024, 64), (8, 512, 64), (3, 2048, 200), (64, 5, 1), (1, 2, 1)]


@pytest.mark.parametrize(("max_rows", "max_model_len", "num_blocks"), SIZES)
@pytest.mark.parametrize("budget", [0.1, -1.0], ids=["in time", "slow"])
def test_measuring(monkeypatch, max_rows, max_model_len, num_blocks, budget):
    monkeypatch.setattr(cost, "_MEASURING_SECONDS", budget)
    costs = measure(Lax(max_model_len=max_model_len, num_blocks=num_blocks), max_rows=max_rows)
    assert 0 < costs.seconds(1) <= costs.seconds(8) <= costs.seconds(64, 10_000)


@pytest.mark.parametrize(("max_rows", "max_model_len", "num_blocks"), SIZES[:5])
@pytest.mark.parametrize("budget", [1.0, -1.0], ids=["in time", "slow"])
def test_what_contexts_and_keys_cost(monkeypatch, max_rows, max_model_len, num_blocks, budget):
    per_key, per_context = 6e-7, 3e-6

    def timed(runner, rows, context):
        return 7e-3 + 1e-3 * rows + per_key * rows * context + per_context * context

    monkeypatch.setattr(cost, "_timed_pass", timed)
    monkeypatch.setattr(cost, "_MEASURING_SECONDS", budget)
    costs = measure(Lax(max_model_len=max_model_len, num_blocks=num_blocks), max_rows=max_rows)
    assert costs.seconds(1, 5000) - costs.seconds(1) == pytest.approx(5000 * per_key)
    assert costs.seconds(1, 0, 5000) - costs.seconds(1) == pytest.approx(5000 * per_context)
    assert costs.seconds(max_rows) == pytest.approx(7e-3 + 1e-3 * max_rows)


@pytest.mark.parametrize("seed", range(5))
def test_measuring_on_a_noisy_machine(monkeypatch, seed):
    """Contexts that are long enough to be seen, and no row that is cheap because a shorter pass was disturbed."""
    rng, per_key, per_context = random.Random(seed), 6e-7, 3e-6

    def timed(runner, rows, context):
        seconds = 7e-3 + 1e-3 * max(0, rows - 2) + per_key * rows * context + per_context * context
        return seconds * rng.choice([*[1.0] * 8, 1.05, 1.5])

    monkeypatch.setattr(cost, "_timed_pass", timed)
    costs = measure(Lax(max_model_len=2048, num_blocks=200), max_rows=64)
    rises = [costs.seconds(rows + 1) - costs.seconds(rows) for rows in range(8, 40)]
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(rises))
    assert costs.seconds(33) - costs.seconds(16) == pytest.approx(17e-3, rel=0.3)
    sixteen = costs.seconds(16, 16 * 450, 16 * 450) - costs.seconds(16)
    assert sixteen == pytest.approx(16 * 450 * (per_key + per_context), rel=0.4)


def test_few_measured_passes_do_not_swing():
    costs = PassCosts({1: 0.04, 2: 0.05})
    estimates = []
    for step in range(2000):
        costs.observe(17, 0, 0, 1.0)
        if step > 1000:
            estimates.append(costs.seconds(17))
    assert min(estimates) > 0.5
    assert max(estimates) < 1.1 * min(estimates)


def test_what_lies_beyond_moves_along():
    """Or passes that take longer than they did would make the next rows look cheap."""
    costs = PassCosts(CURVE)
    for _ in range(2000):
        costs.observe(8, 0, 0, 14e-3)
    assert costs.seconds(8) == pytest.approx(14e-3, rel=0.05)
    assert costs.seconds(16) - costs.seconds(8) > 6e-3
    assert costs.seconds(24) - costs.seconds(16) > 6e-3


@pytest.mark.parametrize("eight", [7.2e-3, 6.5e-3])
def test_passes_that_are_quicker_than_shorter_ones_were_make_no_longer_ones_cheap(eight):
    costs = PassCosts({1: 5e-3, 2: 5.8e-3, 4: 7e-3, 6: 7.5e-3, 8: 8.5e-3, 12: 11e-3, 16: 14e-3})
    for _ in range(1000):
        costs.observe(1, 0, 0, 5e-3)
        costs.observe(8, 0, 0, eight)
    assert costs.seconds(8) == pytest.approx(eight, rel=0.05)
    assert costs.seconds(6) <= costs.seconds(8)
    assert costs.seconds(16) - costs.seconds(8) == pytest.approx(5.5e-3, rel=0.1)


def test_a_curve_that_moved_down_at_many_places_stays_above_zero():
    costs, rng = PassCosts(dict.fromkeys(CURVE, 0.01)), random.Random(1)
    for _ in range(5000):
        rows = rng.choice([1, 2, 4, 8, 16])
        costs.observe(rows, 0, 0, 1e-2 if rows == 1 else 1e-3)
    assert 1e-4 < costs.seconds(1) <= costs.seconds(16) <= costs.seconds(300)


def test_rows_share_what_is_read_of_a_context():
    costs = PassCosts(CURVE, seconds_per_key=1e-7, seconds_per_context=1e-6)
    assert costs.seconds(4, 4 * 1000, 1000) == pytest.approx(7.4e-3 + 4e-4 + 1e-3)
    for _ in range(2000):
        costs.observe(1, 5000, 5000, 5e-3 + 5000 * 1.1e-6)
    assert costs.seconds(1) == pytest.approx(5e-3, rel=0.05), "a long context does not make short ones look dear"


def test_passes_over_two_rows_leave_the_shape_of_one_alone():
    costs = PassCosts({1: 5e-3, 2: 6e-3, 4: 8e-3})
    for _ in range(2000):
        costs.observe(2, 0, 0, 12e-3)
    assert costs.seconds(2) == pytest.approx(12e-3, rel=0.05)
    assert costs.seconds(1) < 10.1e-3


def test_keys_that_were_priced_too_high_do_not_drive_the_curve_to_nothing():
    costs = PassCosts(CURVE, seconds_per_key=1e-5)
    for _ in range(3000):
        costs.observe(1, 8000, 0, 6e-3)
    assert costs.seconds(1) > 1e-4
    assert costs.seconds(1, 8000) == pytest.approx(6e-3, rel=0.2)
