"""min-p, top-k and top-p against a full sort, and against transformers' own warpers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.sampling.filters import best_first, laws
from paceline.types import RowSampling


def rows(count, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **more):
    return RowSampling(
        temperature=np.full(count, temperature, np.float32),
        top_k=np.full(count, top_k, np.int32),
        top_p=np.full(count, top_p, np.float32),
        min_p=np.full(count, min_p, np.float32),
        seed=np.zeros(count, np.uint64),
        stream=np.zeros(count, np.uint32),
        position=np.zeros(count, np.uint32),
        purpose=np.zeros(count, np.uint32),
        **more,
    )


def slow_law(logits, temperature, top_k, top_p, min_p):
    """One row, by sorting everything; ties keep the lowest id."""
    z = (logits.astype(np.float64) - logits.max()) / np.float64(np.float32(temperature))
    order = [t for t in sorted(range(len(z)), key=lambda t: (-z[t], t)) if np.isfinite(z[t])]
    order = [t for t in order if min_p == 0 or z[t] >= np.log(np.float64(np.float32(min_p)))]
    order = order[: top_k or None]
    weights = np.exp(z[order])
    before = np.concatenate(([0.0], np.cumsum(weights)[:-1])) / weights.sum()
    kept = [t for t, mass in zip(order, before, strict=True) if mass < np.float64(np.float32(top_p)) or t == order[0]]
    law = np.zeros(len(z))
    law[kept] = np.exp(z[kept])
    return law / law.sum()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 200), st.integers(0, 999), st.sampled_from([0.3, 1.0, 2.5]), st.sampled_from([0, 1, 3, 50]),
    st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]), st.sampled_from([0.0, 0.02, 0.3, 1.0]), st.sampled_from([0, 1, 2]),
)  # fmt: skip
def test_laws_are_those_of_a_full_sort(size, seed, temperature, top_k, top_p, min_p, decimals):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(size).astype(np.float32) * 4
    if decimals:  # many ties
        logits = np.round(logits, decimals - 1)
    logits[rng.random(size) < 0.1] = -np.inf
    logits[rng.integers(size)] = 1.0
    got = laws(logits[None], rows(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))[0]
    np.testing.assert_allclose(got, slow_law(logits, temperature, top_k, top_p, min_p), atol=1e-12)


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0, 300.0])
@pytest.mark.parametrize("top_p", [0.1, 0.95, 0.9999])
def test_top_p_on_a_large_vocabulary(spread, top_p):
    logits = (np.random.default_rng(3).standard_normal(20_000) * spread).astype(np.float32)
    got = laws(logits[None], rows(1, top_p=top_p))[0]
    expected = slow_law(logits, 1.0, 0, top_p, 0.0)
    assert abs(np.count_nonzero(got) - np.count_nonzero(expected)) <= 1  # the sums are rounded in another order
    np.testing.assert_allclose(got, expected, atol=2.0 / np.count_nonzero(expected) * 1e-3)


def test_the_law_is_that_of_the_warpers_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    logits = np.random.default_rng(5).standard_normal((8, 500)).astype(np.float32) * 3
    z = torch.from_numpy(logits)
    for warper in (
        transformers.TemperatureLogitsWarper(0.7),
        transformers.MinPLogitsWarper(0.002),
        transformers.TopKLogitsWarper(40),
        transformers.TopPLogitsWarper(0.85),
    ):
        z = warper(torch.zeros(8, 0, dtype=torch.long), z)
    got = laws(logits, rows(8, temperature=0.7, min_p=0.002, top_k=40, top_p=0.85))
    np.testing.assert_allclose(got, torch.softmax(z.double(), dim=-1).numpy(), atol=1e-6)


def test_greedy_rows_keep_their_likeliest_token():
    logits = np.array([[0.0, 2.0, 2.0], [3.0, 1.0, -1.0]], np.float32)
    np.testing.assert_array_equal(laws(logits, rows(2, temperature=0.0)), [[0, 1, 0], [1, 0, 0]])


def test_a_tiny_temperature_neither_overflows_nor_warns():
    with np.errstate(over="raise", invalid="raise"):
        law = laws(np.array([[1.0, 90.0, 89.0]], np.float32), rows(1, temperature=1e-30, top_p=0.9))
    np.testing.assert_array_equal(law, [[0, 1, 0]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banning_every_token_is_an_error(temperature):
    banned = rows(1, temperature=temperature, allowed=np.zeros((1, 1), np.uint8))
    with pytest.raises(ConfigError, match="every token is banned"):
        laws(np.zeros((1, 3), np.float32), banned)


def test_best_first_breaks_ties_by_the_lowest_index():
    values = np.array([1.0, 3.0, 2.0, 3.0, 2.0, 2.0])
    assert best_first(values, 4).tolist() == [1, 3, 2, 4]
    assert best_first(values, 9).tolist() == [1, 3, 2, 4, 5, 0]
    assert best_first(values, 0).tolist() == []
