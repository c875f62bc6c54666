"""What `rejection` and `block` share: acceptance probabilities, coins and the law of the final token."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from paceline.interfaces import Noise
from paceline.sampling.noise import COIN, RESIDUAL
from paceline.sampling.race import race
from paceline.types import Draft, Verdict


class ChainVerifier(ABC):
    """Verifies a chain whose nodes were sampled from a known law q against the target's laws p [N+1, V].

    Lossless if no node was dropped because of a token at or after it. A deterministic draft is q = one-hot. Coins use
    the words of the token they decide on, the final token those of its own position; both are fresh in each attempt.
    """

    lossless = True
    needs_laws = True
    chains_only = True

    @abstractmethod
    def acceptance(self, draft: Draft, laws: np.ndarray) -> np.ndarray:
        """The probability that each coin comes up: [N] float64."""

    @abstractmethod
    def num_accepted(self, acceptance: np.ndarray, coins: np.ndarray) -> np.ndarray:
        """Accepted nodes, given acceptance [N] and coins [..., N] in (0, 1): [...]."""

    @abstractmethod
    def final_law(self, draft: Draft, laws: np.ndarray, num_accepted: int) -> np.ndarray:
        """The law of the token after num_accepted nodes: [V] float64, sums to 1."""

    def verify(self, draft: Draft, rows: np.ndarray, noise: Noise, *, position: int, attempt: int) -> Verdict:
        """Accepts a prefix of the chain and draws the token after it; rows are laws [N+1, V]."""
        assert draft.is_chain, "this rule verifies chains only"
        coins = self.coins(noise, position=position, attempt=attempt, count=len(draft))
        accepted = int(self.num_accepted(self.acceptance(draft, rows), coins))
        uniforms = noise.uniforms(
            position=position + accepted, purpose=RESIDUAL, attempt=attempt, vocab_size=rows.shape[-1]
        )
        return Verdict(
            path=tuple(range(accepted)),
            final_token=int(race(self.final_law(draft, rows, accepted), uniforms)),
            kind="bonus" if accepted == len(draft) else "recovered",
        )

    def coins(self, noise: Noise, *, position: int, attempt: int, count: int) -> np.ndarray:
        """One u for each node: [count] float64."""
        return np.array([noise.uniform(position=position + i, purpose=COIN, attempt=attempt) for i in range(count)])


def draft_law(draft: Draft, node: int, vocab_size: int) -> np.ndarray:
    """The law that a node was sampled from, over the target's vocabulary: [V] float64."""
    law = np.zeros(vocab_size)
    if draft.law is None:
        law[draft.token_ids[node]] = 1.0
    elif draft.law.ids is None:
        law[: draft.law.probs.shape[1]] = draft.law.probs[node]
    else:
        law[draft.law.ids] = draft.law.probs[node]
    return law


def log_ratios(draft: Draft, laws: np.ndarray) -> np.ndarray:
    """log p(x) - log q(x) of each node's token: [N] float64, -inf where the target never says x."""
    nodes = np.arange(len(draft))
    target = laws[nodes, draft.token_ids]
    drafted = np.ones(len(draft))
    if draft.law is not None:
        is_token = draft.token_ids[:, None] == draft.law.ids if draft.law.ids is not None else None
        columns = draft.token_ids if is_token is None else is_token.argmax(axis=1)
        drafted = draft.law.probs[nodes, columns]
        assert is_token is None or is_token.any(axis=1).all(), f"{draft.source} drafted a token outside its law"
    assert np.all(drafted > 0), f"{draft.source} drafted a token that its own law excludes"
    with np.errstate(divide="ignore"):
        return np.log(target) - np.log(drafted)


def residual(target: np.ndarray, drafted: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """norm[scale * p - q]+ of p, q [V].

    Without residual mass it is p: a rejection then has probability zero up to rounding, and p is what is left to say.
    """
    excess = np.maximum(scale * target - drafted, 0.0)
    mass = excess.sum()
    return excess / mass if mass > 0 else target
