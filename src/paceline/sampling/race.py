"""The exponential race: how every random token in Paceline is chosen."""

from __future__ import annotations

import numpy as np


def race(weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Winner of argmax weights / E with E = -log(u), an exact draw from weights / sum(weights).

    weights [..., V] >= 0, not all 0, need not sum to 1; uniforms [..., V] in (0, 1). Returns [...] int64, the lowest
    index on ties. The same as adding Gumbel noise -log E to log weights; exact up to the grid of u.
    """
    scores = np.log(uniforms)  # -E
    np.divide(weights, scores, out=scores)
    return np.argmin(scores, axis=-1)
