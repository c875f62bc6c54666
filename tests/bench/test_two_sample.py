"""The two-sample test: blind to nothing that a biased rule would do, and quiet where the law is the same."""

from __future__ import annotations

import numpy as np

from paceline.bench.two_sample import p_value

LAW = np.array([0.5, 0.3, 0.15, 0.05])


def texts(law: np.ndarray, seed: int, *, count: int = 400) -> np.ndarray:
    return np.random.default_rng(seed).choice(len(law), size=(count, 3), p=law).astype(np.int32)


def test_one_law_is_found_to_be_one():
    values = [p_value([texts(LAW, seed)], [texts(LAW, 1000 + seed)]) for seed in range(30)]
    assert min(values) > 1e-3
    assert 0.3 < np.mean(values) < 0.7


def test_a_law_that_is_somewhat_off_is_found():
    off = LAW + np.array([-0.08, 0.08, 0.0, 0.0])
    assert p_value([texts(LAW, seed) for seed in range(4)], [texts(off, 50 + seed) for seed in range(4)]) < 1e-3


def test_tokens_that_depend_on_each_other_are_found():
    """Each place has the right law, but a token is always followed by itself."""
    bound = np.repeat(texts(LAW, 3)[:, :1], 3, axis=1)
    assert p_value([texts(LAW, 1)], [bound]) < 1e-3


def test_texts_that_end_early_are_found():
    ended = texts(LAW, 2)
    ended[:60, 1:] = -1
    assert p_value([texts(LAW, 1)], [ended]) < 1e-3


def test_samples_of_different_size():
    assert p_value([texts(LAW, 1, count=100)], [texts(LAW, 2)]) > 1e-3
