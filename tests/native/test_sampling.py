"""Native row sampling against sampling.sampler.sample_rows, whose law and race are proved by its own tests."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy import stats

from noise_vectors import FROZEN, KNOWN_ANSWERS
from paceline import _native
from paceline.sampling.filters import laws
from paceline.sampling.noise import purpose_word, words
from paceline.sampling.processors import RowAdjustments, pack_adjustments
from paceline.sampling.sampler import sample_rows
from paceline.types import ForwardOutput, RowSampling, TokenMap


def available(isa: str) -> bool:
    try:
        _native.row_words(0, seed=0, stream=0, position=0, purpose=0, isa=isa)
    except ValueError:
        return False
    return True


ISAS = [isa for isa in ("avx512", "avx2", "portable") if available(isa)]
FILTERS = [
    dict(zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True))
    for values in product((0.0, 0.3, 1.0, 2.5), (0, 1, 20, 500), (1.0, 0.95, 0.4), (0.0, 0.02))
]


def rows(count, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, random=0, **more) -> RowSampling:
    rng = np.random.default_rng(random)
    columns = {
        "temperature": np.full(count, temperature, np.float32),
        "top_k": np.full(count, top_k, np.int32),
        "top_p": np.full(count, top_p, np.float32),
        "min_p": np.full(count, min_p, np.float32),
        "seed": rng.integers(0, 2**64, count, np.uint64),
        "stream": rng.integers(0, 8, count, np.uint32),
        "position": rng.integers(0, 2**17, count, np.uint32),
        "purpose": np.full(count, purpose_word(1, 9), np.uint32),
    }
    given = {name: np.asarray(value, columns[name].dtype) if name in columns else value for name, value in more.items()}
    return RowSampling(**(columns | given))


def some_logits(count, vocab_size, *, spread=3.0, seed=0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, vocab_size)) * spread).astype(np.float32)


def check(logits: np.ndarray, sampling: RowSampling, isas: list[str] = ISAS) -> ForwardOutput:
    """Every instruction set gives what NumPy gives: the very tokens and ranks, log-probabilities to rounding."""
    expected = sample_rows(logits, sampling)
    for isa in isas:
        got = _native.sample_rows(logits, sampling, isa)
        np.testing.assert_array_equal(got["token_ids"], expected.token_ids, isa)
        assert (got["token_ids"][got["all_banned"]] < 0).all()
        assert not got["has_nan"].any()
        assert ("successors" in got) == (expected.successors is not None)
        if expected.successors is not None:
            np.testing.assert_array_equal(got["successors"], expected.successors)
        assert ("candidates" in got) == (expected.candidates is not None)
        if expected.candidates is not None:
            np.testing.assert_array_equal(got["candidates"], expected.candidates, isa)
            np.testing.assert_allclose(got["candidate_scores"], expected.candidate_scores, rtol=1e-5, atol=2e-6)
        assert ("rank" in got) == (expected.logprobs is not None)
        if expected.logprobs is not None:
            for name in ("rank", "top_ids"):
                np.testing.assert_array_equal(got[name], getattr(expected.logprobs, name))
            for name in ("token", "top"):
                np.testing.assert_allclose(got[name], getattr(expected.logprobs, name), rtol=1e-6, atol=2e-6)
    return expected


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    assert tuple(_native.philox4x32(counter, key[0] | key[1] << 32)) == expected


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("row", "expected"), FROZEN)
def test_words_of_a_row(row, expected, isa):
    seed, stream, position, purpose, attempt = row
    counter = {"seed": seed, "stream": stream, "position": position, "purpose": purpose_word(purpose, attempt)}
    drawn = _native.row_words(40, **counter, isa=isa)
    assert tuple(drawn[:6].tolist()) == expected
    np.testing.assert_array_equal(drawn, words(np.arange(320), **counter).reshape(-1))
    for token in (0, 7, 1279):
        key_counter = (token // 4, position, stream, counter["purpose"])
        assert _native.philox4x32(key_counter, seed)[token % 4] == drawn[token]


@pytest.mark.parametrize("vocab_size", [1, 7, 63, 64, 65, 1000])
@pytest.mark.parametrize("spread", [0.2, 3.0, 15.0])
def test_tokens_are_those_of_numpy_under_every_filter(vocab_size, spread):
    for i, filters in enumerate(FILTERS):
        logits = some_logits(8, vocab_size, spread=spread, seed=i)
        check(logits, rows(8, **filters, random=i, num_logprobs=4, num_successors=3))


@pytest.mark.parametrize("vocab_size", [49_152, 151_936])
@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.0}, {}, {"temperature": 40.0}, {"top_k": 50, "top_p": 0.9}, {"top_k": 5000},
        {"top_p": 0.9}, {"top_p": 0.999, "temperature": 40.0}, {"min_p": 0.01, "temperature": 1.5},
    ],
)  # fmt: skip
def test_tokens_are_those_of_numpy_on_real_vocabularies(vocab_size, filters):
    logits = some_logits(6, vocab_size, seed=1)
    logits[:3, 1234] += 18  # half of the rows are confident
    check(logits, rows(6, **filters, num_logprobs=10, num_successors=8), [isa for isa in ISAS if isa != "portable"])
    check(logits[2:4], rows(2, **filters), ["portable"])


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3, 100.0])
def test_huge_and_tiny_temperatures(temperature):
    logits = some_logits(20, 3000, spread=2.0)
    logits[:10, [700, 2999]] = 11.0  # two likeliest tokens
    for filters in ({}, {"top_p": 0.5}, {"top_k": 40}, {"min_p": 0.5}):
        check(logits, rows(20, temperature=temperature, **filters))


@pytest.mark.parametrize("decimals", [0, 1])
def test_ties_go_to_the_lowest_id(decimals):
    logits = np.round(some_logits(20, 2000, spread=1.0), decimals)
    for filters in FILTERS:
        check(logits, rows(20, **filters, num_logprobs=30, num_successors=70))
    check(np.where(logits == 0, -logits, logits), rows(20, temperature=0.0, num_successors=2000))  # -0 equals 0


def test_logits_of_minus_infinity():
    logits = some_logits(20, 500)
    logits[np.random.default_rng(2).random(logits.shape) < 0.95] = -np.inf
    logits[:, 77] = 0.0
    for filters in FILTERS:
        check(logits, rows(20, **filters, num_logprobs=100, num_successors=100))


@pytest.mark.parametrize(
    ("position", "token", "word"),
    [(13_424_354, 145, 0xFFFFFFFF), (6_948_711, 0, 0x1F)],  # found by search: as lucky and as unlucky as words get
)
def test_extreme_words(position, token, word):
    """There the bounds that spare blocks and tokens the exact race are tightest."""
    counter = {"seed": 3, "stream": 0, "purpose": 0, "position": position}
    assert words(np.array([token // 4]), **counter)[0, token % 4] == word
    count = 400
    logits = np.full((count, 256), -np.inf, np.float32)
    logits[:, 0] = 0
    if token:  # a far less likely one wins, alone in its block of 64
        logits[:, token] = np.linspace(-26, -18, count)
    else:  # the likeliest loses against the next, and they to others
        logits[:, 64:] = np.linspace(-30, -2, count)[:, None] - np.linspace(0, 2, 192)
    sampling = rows(count, **{name: np.full(count, value) for name, value in counter.items()})
    won = check(logits, sampling).token_ids
    assert 20 < np.count_nonzero(won) < count - 20


def test_adjustments_and_masks():
    rng = np.random.default_rng(4)
    vocab_size, count = 333, 24
    logits = some_logits(count, vocab_size, spread=1.0)
    before = logits.copy()
    changes = []
    for i in range(count):
        ids = rng.permutation(vocab_size)[: 10 * (i % 4)].astype(np.int32)
        bias = np.where(rng.random(len(ids)) < 0.2, -np.inf, rng.normal(0, 3, len(ids))).astype(np.float32)
        scale = rng.uniform(0.8, 1.5, len(ids)).astype(np.float32)
        changes.append(RowAdjustments(ids, bias, scale, rng.uniform(0, 2, len(ids)).astype(np.float32)))
    adjustments = pack_adjustments(changes)
    allowed = rng.integers(0, 256, (count, 42), np.uint8)
    allowed[::3] = 255
    wanted = np.where(np.arange(count) % 2, rng.integers(0, vocab_size, count), -1).astype(np.int32)
    for filters in FILTERS[::3]:
        for adjusting in (
            {"adjustments": adjustments},
            {"allowed": allowed},
            {"adjustments": adjustments, "allowed": allowed},
        ):
            check(logits, rows(count, **filters, **adjusting, num_logprobs=3, num_successors=2, logprob_ids=wanted))
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_candidates_of_any_filters(filters):
    for count, vocab_size, spread in ((1, 1300, 3.0), (8, 1300, 6.0), (64, 40, 1.0), (5, 1300, 40.0)):
        check(some_logits(6, vocab_size, spread=spread), rows(6, **filters, num_candidates=count))


def test_candidates_among_ties_and_bans():
    logits = np.zeros((4, 200), np.float32)
    logits[:, ::7] = 2
    allowed = np.zeros((4, 25), np.uint8)
    allowed[:, 3] = 0b10110
    for temperature in (0.0, 1.0):
        for count in (1, 9):
            check(logits, rows(4, temperature=temperature, num_candidates=count))
            check(logits, rows(4, temperature=temperature, num_candidates=count, top_k=5))
            check(logits, rows(4, temperature=temperature, num_candidates=count, allowed=allowed))


@pytest.mark.parametrize("filters", FILTERS[::3], ids=str)
@pytest.mark.parametrize("size", [700, 2000])
def test_tokens_of_another_vocabulary(filters, size):
    """Everything is in its ids; a row that has no token left there gets none."""
    rng = np.random.default_rng(8)
    ids = np.full(1000, -1, np.int32)
    ids[rng.permutation(1000)[:400]] = rng.permutation(size)[:400]
    known = [token_id for token_id in ids.tolist() if token_id >= 0]
    one = np.ones(2, np.float32)
    changes = [RowAdjustments(np.array(known[2 * i : 2 * i + 2], np.int32), 3 * one, one, 0 * one) for i in range(12)]
    allowed = np.full((12, -(-size // 8)), 0xFF, np.uint8)
    allowed[3] = np.packbits(~np.isin(np.arange(size), known), bitorder="little")
    sampling = rows(
        12,
        **filters,
        adjustments=pack_adjustments(changes),
        allowed=allowed,
        num_candidates=4,
        num_successors=3,
        token_map=TokenMap(ids, size),
    )
    expected = check(some_logits(12, 1000), sampling)
    assert expected.token_ids is not None
    assert set(np.delete(expected.token_ids, 3).tolist()) <= set(known)
    assert expected.token_ids[3] == -1


@pytest.mark.parametrize("isa", ISAS)
def test_rows_without_a_token_are_reported(isa):
    logits = np.zeros((5, 70), np.float32)
    logits[1, 69] = np.nan
    logits[2, 3] = np.inf
    logits[3] = -np.inf
    for temperature in (0.0, 1.0):
        got = _native.sample_rows(logits, rows(5, temperature=temperature, num_logprobs=2, top_p=0.5, top_k=9), isa)
        assert got["has_nan"].tolist() == [False, True, True, False, False]
        assert got["all_banned"].tolist() == [False, False, False, True, False]
        assert (got["token_ids"] < 0).tolist() == [False, True, True, True, False]
        nothing = np.zeros((5, 9), np.uint8)
        assert _native.sample_rows(logits, rows(5, temperature=temperature, allowed=nothing), isa)["all_banned"][0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2, "temperature": 1.7}])
def test_tokens_follow_the_law(isa, filters):
    count = 40_000
    logits = np.repeat(some_logits(1, 7, spread=1.0, seed=6), count, axis=0)
    law = laws(logits[:1], rows(1, **filters))[0]
    counts = np.bincount(_native.sample_rows(logits, rows(count, **filters), isa)["token_ids"], minlength=7)
    assert counts[law == 0].sum() == 0
    assert stats.chisquare(counts[law > 0], law[law > 0] * count).pvalue > 1e-4


def test_arrays_that_do_not_fit_are_refused():
    logits = some_logits(2, 20)
    with pytest.raises(ValueError, match="wrong length"):
        _native.sample_rows(logits, rows(3))
    with pytest.raises(ValueError, match="wrong shape"):
        _native.sample_rows(logits, rows(2, allowed=np.zeros((2, 2), np.uint8)))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        _native.sample_rows(logits, rows(2, num_logprobs=1, logprob_ids=np.array([3, 20], np.int32)))
    with pytest.raises(ValueError, match="too many candidates"):
        _native.sample_rows(logits, rows(2, num_candidates=65))
    for ids in (np.zeros(19, np.int32), np.full(20, 30, np.int32)):
        with pytest.raises(ValueError, match=r"wrong length|outside its vocabulary"):
            _native.sample_rows(logits, rows(2, token_map=TokenMap(ids, 30)))
    one = np.ones(1, np.float32)
    outside = pack_adjustments([RowAdjustments(np.array([20], np.int32), one, one, one), None])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        _native.sample_rows(logits, rows(2, adjustments=outside))
    with pytest.raises(ValueError, match="no kernels named"):
        _native.sample_rows(logits, rows(2), "mmx")
