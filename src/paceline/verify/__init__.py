"""Rules that decide which nodes of a draft are kept, one file a rule."""

from __future__ import annotations

from typing import get_args

from paceline.config import Rule, one_of
from paceline.interfaces import Verifier
from paceline.verify.block import BlockVerifier
from paceline.verify.coupled import CoupledVerifier
from paceline.verify.rejection import RejectionVerifier
from paceline.verify.typical import TypicalVerifier


def create(rule: Rule, *, epsilon: float, alpha: float) -> Verifier:
    """The verifier of a rule; epsilon and alpha are the thresholds of `typical`. Raises ConfigError if unknown."""
    one_of("verification", rule, get_args(Rule))
    match rule:
        case "coupled":
            return CoupledVerifier()
        case "rejection":
            return RejectionVerifier()
        case "block":
            return BlockVerifier()
        case "typical":
            return TypicalVerifier(epsilon=epsilon, alpha=alpha)
