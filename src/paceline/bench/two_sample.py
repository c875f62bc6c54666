"""Whether two samples of short texts come from one law: what `verify` asks of rules that keep the law, not the ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_PERMUTATIONS = 1999


def p_value(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> float:
    """How often samples of one law differ as much as these: a two-sample chi-square over the counts of all beginnings.

    first, second: for each prompt the texts [S, T] int32 that either way of decoding wrote, -1 after their ends. What
    the statistic may be by chance is found by dealing the texts of a prompt out anew, 1,999 times, as many of the
    counts are too small for the textbook's chi-square law.
    """
    rng = np.random.default_rng(0)
    statistics = np.zeros(1 + _PERMUTATIONS)
    for own, other in zip(first, second, strict=True):
        texts = np.concatenate([own, other])
        hands = np.zeros((1 + _PERMUTATIONS, len(texts)), dtype=np.float32)  # 1 = among the first
        hands[:, : len(own)] = 1.0
        hands[1:] = rng.permuted(hands[1:], axis=1)
        share = len(own) / len(texts)
        for length in range(1, texts.shape[1] + 1):
            _, kinds = np.unique(texts[:, :length], axis=0, return_inverse=True)
            members = np.eye(kinds.max() + 1, dtype=np.float32)[kinds.ravel()]  # [texts, kinds]
            expected = share * members.sum(axis=0)
            statistics += ((hands @ members - expected) ** 2 / expected).sum(axis=1) / (1 - share)
    return float(np.count_nonzero(statistics >= statistics[0] - 1e-6) / len(statistics))
