"""Block verification (Sun et al., 2403.10444): never fewer expected tokens than `rejection`, the same law."""

from __future__ import annotations

import numpy as np

from paceline.types import Draft
from paceline.verify.chain import ChainVerifier, draft_law, log_ratios, residual


class BlockVerifier(ChainVerifier):
    """Accepts the longest prefix whose coin comes up, judged by the whole prefix's running ratio p_i.

    p_0 = 1; p_i = min(1, p_{i-1} P_{i-1}(x_i) / Q_{i-1}(x_i)); Z_i = sum [p_i P_i - Q_i]+;
    h_i = Z_i / (Z_i + 1 - p_i) for i < N (1 where the denominator is 0), h_N = p_N.
    """

    def acceptance(self, draft: Draft, laws: np.ndarray) -> np.ndarray:
        """h_1 .. h_N: [N] float64."""
        prefixes = self._prefixes(draft, laws)
        acceptance = prefixes[1:].copy()
        for i in range(1, len(draft)):
            excess = np.maximum(prefixes[i] * laws[i] - draft_law(draft, i, laws.shape[-1]), 0.0).sum()
            rest = excess + 1.0 - prefixes[i]
            acceptance[i - 1] = excess / rest if rest > 0 else 1.0
        return acceptance

    def num_accepted(self, acceptance: np.ndarray, coins: np.ndarray) -> np.ndarray:
        """The longest prefix whose own coin comes up, whatever the coins before it say."""
        lengths = np.arange(1, acceptance.shape[-1] + 1)
        return np.max(lengths * (coins <= acceptance), axis=-1, initial=0)

    def final_law(self, draft: Draft, laws: np.ndarray, num_accepted: int) -> np.ndarray:
        """norm[p_i P_i - Q_i]+ after i < N nodes, the target's own law after the last."""
        if num_accepted == len(draft):
            return laws[num_accepted]
        scale = float(self._prefixes(draft, laws)[num_accepted])
        return residual(laws[num_accepted], draft_law(draft, num_accepted, laws.shape[-1]), scale)

    def _prefixes(self, draft: Draft, laws: np.ndarray) -> np.ndarray:
        """p_0 .. p_N: [N+1] float64, multiplied in log space."""
        logs = np.zeros(len(draft) + 1)
        for i, ratio in enumerate(log_ratios(draft, laws).tolist()):
            logs[i + 1] = min(0.0, logs[i] + ratio)
        return np.exp(logs)
