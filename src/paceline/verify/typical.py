"""Typical acceptance (Medusa, 2401.10774): keeps what is plausible. Lossy, opt-in."""

from __future__ import annotations

import numpy as np

from paceline.interfaces import Noise
from paceline.sampling.noise import RESIDUAL
from paceline.sampling.race import race
from paceline.types import Draft, Verdict


class TypicalVerifier:
    """Accepts x while p(x) > min(epsilon, alpha * exp(-H(p))), with H the entropy of p in nats.

    The final token is drawn as Medusa does: from p without the tokens below the same threshold. Greedy rows, whose
    law is one-hot, give the target's own text. rows are laws [N+1, V].
    """

    lossless = False
    needs_laws = True
    chains_only = True

    def __init__(self, *, epsilon: float, alpha: float) -> None:
        self._epsilon = epsilon
        self._alpha = alpha

    def verify(self, draft: Draft, rows: np.ndarray, noise: Noise, *, position: int, attempt: int) -> Verdict:
        """The longest plausible prefix of the chain, and a plausible token after it."""
        assert draft.is_chain, "this rule verifies chains only"
        accepted = 0
        while accepted < len(draft) and rows[accepted, draft.token_ids[accepted]] > self._threshold(rows[accepted]):
            accepted += 1
        law = rows[accepted]
        plausible = np.where(law >= self._threshold(law), law, 0.0)
        uniforms = noise.uniforms(
            position=position + accepted, purpose=RESIDUAL, attempt=attempt, vocab_size=rows.shape[-1]
        )
        return Verdict(
            path=tuple(range(accepted)),
            final_token=int(race(plausible, uniforms)),
            kind="bonus" if accepted == len(draft) else "recovered",
        )

    def _threshold(self, law: np.ndarray) -> float:
        likely = law[law > 0]
        entropy = -float(np.sum(likely * np.log(likely)))
        return min(self._epsilon, self._alpha * float(np.exp(-entropy)))
