"""The noise's words, pinned: they define what a seed means."""

import numpy as np
import pytest

from noise_vectors import FROZEN, KNOWN_ANSWERS, ONES
from paceline.sampling.noise import (
    COIN,
    DRAFT,
    RESIDUAL,
    SAMPLE,
    PhiloxNoise,
    philox4x32,
    purpose_word,
    row_words,
    to_uniform,
    words,
)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_random123_known_answers(counter, key, expected):
    np.testing.assert_array_equal(philox4x32(np.array(counter, np.uint32), np.array(key, np.uint32)), expected)


def test_counters_and_keys_broadcast():
    counters = np.array([a[0] for a in KNOWN_ANSWERS], np.uint32)
    keys = np.array([a[1] for a in KNOWN_ANSWERS], np.uint32)
    expected = np.array([a[2] for a in KNOWN_ANSWERS], np.uint32)
    np.testing.assert_array_equal(philox4x32(counters, keys), expected)
    grid = philox4x32(counters[:, None], keys[None])
    assert grid.shape == (3, 3, 4)
    np.testing.assert_array_equal(grid[range(3), range(3)], expected)


@pytest.mark.parametrize(("row", "expected"), FROZEN)
def test_frozen_words(row, expected):
    seed, stream, position, purpose, attempt = row
    word = purpose_word(purpose, attempt)
    np.testing.assert_array_equal(
        row_words(6, seed=seed, stream=stream, position=position, purpose=word), np.array(expected, np.uint32)
    )
    noise = PhiloxNoise(seed, stream)
    uniforms = noise.uniforms(position=position, purpose=purpose, attempt=attempt, vocab_size=6)
    np.testing.assert_array_equal(uniforms, (np.array(expected, np.float64) + 0.5) / 2**32)
    assert noise.uniform(position=position, purpose=purpose, attempt=attempt) == uniforms[0]


def test_the_counter_is_laid_out_as_documented():
    seed, stream, position, purpose, attempt = 0x0123456789ABCDEF, 3, 77, COIN, 5
    drawn = row_words(11, seed=seed, stream=stream, position=position, purpose=purpose_word(purpose, attempt))
    for token in range(11):
        counter = np.array([token // 4, position, stream, purpose | attempt << 3], np.uint32)
        key = np.array([0x89ABCDEF, 0x01234567], np.uint32)
        assert drawn[token] == philox4x32(counter, key)[token % 4]


def test_many_rows_at_once_give_each_row_its_words():
    rows = [(1, 0, 5, 0), (2**64 - 1, 2, 9, 2 | 4 << 3), (12345, 1, 0, 3)]
    seed, stream, position, purpose = (np.array(column, np.uint64)[:, None] for column in zip(*rows, strict=True))
    drawn = words(np.arange(3)[None], seed=seed, stream=stream, position=position, purpose=purpose).reshape(3, 12)
    for got, (s, t, p, w) in zip(drawn, rows, strict=True):
        np.testing.assert_array_equal(got, row_words(12, seed=s, stream=t, position=p, purpose=w))


def test_uniforms_never_reach_0_or_1():
    extremes = to_uniform(np.array([0, ONES], np.uint32))
    assert extremes.tolist() == [2.0**-33, 1 - 2.0**-33]


def test_purposes_and_attempts_never_share_a_word():
    made = {purpose_word(p, a) for p in (SAMPLE, DRAFT, COIN, RESIDUAL) for a in range(100)}
    assert len(made) == 400
