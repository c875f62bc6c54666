"""Speculative sampling token by token (Leviathan et al., 2211.17192; Chen et al., 2302.01318)."""

from __future__ import annotations

import numpy as np

from paceline.types import Draft
from paceline.verify.chain import ChainVerifier, draft_law, log_ratios, residual


class RejectionVerifier(ChainVerifier):
    """Accepts x with probability min(1, p(x) / q(x)); at the first rejection the token comes from norm[p - q]+."""

    def acceptance(self, draft: Draft, laws: np.ndarray) -> np.ndarray:
        """min(1, p(x) / q(x)) of each node: [N] float64."""
        return np.exp(np.minimum(log_ratios(draft, laws), 0.0))

    def num_accepted(self, acceptance: np.ndarray, coins: np.ndarray) -> np.ndarray:
        """Nodes before the first rejection."""
        return np.logical_and.accumulate(coins <= acceptance, axis=-1).sum(axis=-1)

    def final_law(self, draft: Draft, laws: np.ndarray, num_accepted: int) -> np.ndarray:
        """The residual after a rejection, the target's own law after the last node."""
        if num_accepted == len(draft):
            return laws[num_accepted]
        return residual(laws[num_accepted], draft_law(draft, num_accepted, laws.shape[-1]))
