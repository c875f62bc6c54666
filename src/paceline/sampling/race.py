"""The exponential race: how every random token in Paceline is chosen."""

from __future__ import annotations

import numpy as np

from paceline.sampling.noise import row_words, to_uniform
from paceline.types import RowSampling


def race(weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Winner of argmax weights / E with E = -log(u), an exact draw from weights / sum(weights).

    weights [..., V] >= 0, not all 0, need not sum to 1; uniforms [..., V] in (0, 1). Returns [...] int64, the lowest
    index on ties. The same as adding Gumbel noise -log E to log weights; exact up to the grid of u.
    """
    return np.argmin(negative_scores(weights, uniforms), axis=-1)


def negative_scores(weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """weights / -E [..., V] float64: the less, the better."""
    scores = np.log(uniforms)  # -E
    np.divide(weights, scores, out=scores)
    return scores


def row_uniforms(vocab_size: int, sampling: RowSampling, row: int) -> np.ndarray:
    """u of all tokens of one row: [V] float64."""
    return to_uniform(
        row_words(
            vocab_size,
            seed=int(sampling.seed[row]),
            stream=int(sampling.stream[row]),
            position=int(sampling.position[row]),
            purpose=int(sampling.purpose[row]),
        )
    )
