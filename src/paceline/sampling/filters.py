"""From adjusted logits to the law of a row: temperature, min-p, top-k, top-p, in this order (vLLM's)."""

from __future__ import annotations

import numpy as np

from paceline.errors import ConfigError
from paceline.sampling.processors import adjusted_row
from paceline.types import RowSampling

_BUCKETS_PER_NAT = 64  # resolution of the nucleus histogram
_NUM_BUCKETS = 4096


def survivors(logits: np.ndarray, sampling: RowSampling, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of adjusted logits [V] that the row's filters keep: ids [K] ascending, log weights [K] float64.

    A log weight is (z - max z) / temperature, so the likeliest token has 0; temperature 0 keeps that token alone.
    Ties at a border keep the lowest ids. Raises ConfigError if every token is banned.
    """
    likeliest = int(logits.argmax())
    if logits[likeliest] == -np.inf:
        raise ConfigError(
            "every token is banned by allowed_token_ids, banned_token_ids, logit_bias or min_tokens; at least one"
            " must stay: allow more tokens."
        )
    temperature, min_p, top_p = (float(x[row]) for x in (sampling.temperature, sampling.min_p, sampling.top_p))
    if temperature == 0:
        return np.array([likeliest]), np.zeros(1)
    log_weights = logits.astype(np.float64)
    log_weights -= logits[likeliest]
    log_weights /= temperature
    lowest = np.log(min_p) if min_p > 0 else np.finfo(np.float64).min  # the latter drops banned tokens only
    ids = np.flatnonzero(log_weights >= lowest)
    if len(ids) < len(log_weights):
        log_weights = log_weights[ids]
    top_k = int(sampling.top_k[row])
    if 0 < top_k < len(ids):
        kept = np.sort(best_first(log_weights, top_k))
        ids, log_weights = ids[kept], log_weights[kept]
    if top_p < 1:
        kept = _nucleus(log_weights, top_p)
        ids, log_weights = ids[kept], log_weights[kept]
    return ids, log_weights


def best_first(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest of values [K], largest first, lowest index first among ties; sorts only those."""
    if count < 1:
        return np.empty(0, dtype=np.int64)
    candidates = np.arange(len(values))
    if count < len(values):
        border = np.partition(values, len(values) - count)[len(values) - count]
        candidates = np.flatnonzero(values >= border)
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:count]]


def laws(logits: np.ndarray, sampling: RowSampling) -> np.ndarray:
    """The laws that rows of logits [M, V] float32 are sampled from, after all processors: [M, V] float64.

    Greedy rows have all their mass on the likeliest token. Raises ConfigError if a row bans every token.
    """
    result = np.zeros(logits.shape)
    for i in range(len(logits)):
        ids, log_weights = survivors(adjusted_row(logits, sampling, i), sampling, i)
        result[i, ids] = normalised(log_weights)
    return result


def normalised(log_weights: np.ndarray) -> np.ndarray:
    """Probabilities in proportion to exp(log_weights [K]), whose largest is 0."""
    weights = np.exp(log_weights)
    return weights / weights.sum()


def _nucleus(log_weights: np.ndarray, top_p: float) -> np.ndarray:
    """Mask [K] of the smallest set of likeliest tokens that holds top_p of the mass.

    No sort of the vocabulary: a histogram over log weights finds the bucket where the mass is reached, and only that
    bucket is sorted.
    """
    weights = np.exp(log_weights)
    buckets = np.minimum(log_weights * -_BUCKETS_PER_NAT, _NUM_BUCKETS - 1).astype(np.int32)
    mass = np.cumsum(np.bincount(buckets, weights=weights))
    target = top_p * mass[-1]
    border = int(np.searchsorted(mass, target))  # first bucket whose end reaches the target
    kept = buckets < border
    inside = np.flatnonzero(buckets == border)
    inside = inside[np.argsort(-log_weights[inside], kind="stable")]
    reached = (mass[border - 1] if border else 0.0) + np.cumsum(weights[inside])
    kept[inside[: int(np.searchsorted(reached, target)) + 1]] = True
    return kept
