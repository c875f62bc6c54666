"""Rotary position embeddings: what a config says, and the frequencies that follow from it.

Frequencies are fixed once from the engine's maximum length, never from the tokens of a pass. This differs on purpose
from transformers, whose `dynamic` and `longrope` variants look at the longest position of each pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.errors import CorruptFileError
from paceline.models.spec_checks import real, whole

RopeScaling = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of one kind of layer."""

    theta: float  # base of the wavelengths
    dim: int  # leading dimensions of a head that are rotated; the rest pass through
    scaling: RopeScaling = "default"
    factor: float = 1.0  # how far the context is stretched
    original_max_position: int = 0  # context before stretching
    attention_factor: float | None = None  # yarn, longrope: multiplies cos and sin; None = the papers' formula
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: whole dimensions as bounds of the ramp
    short_factor: tuple[float, ...] | None = None  # longrope [dim / 2]; None = in the weights (GGUF)
    long_factor: tuple[float, ...] | None = None  # longrope [dim / 2]; None = in the weights (GGUF)

    def __post_init__(self) -> None:
        real("rope_theta", self.theta, above=1.0)  # its logarithm divides
        whole("rotated width of a head", self.dim, least=4 if self.scaling == "dynamic" else 2)
        for name in ("factor", "low_freq_factor", "beta_fast", "beta_slow"):
            real(f"rope {name}", getattr(self, name))
        real("rope high_freq_factor", self.high_freq_factor, above=self.low_freq_factor)
        stretched = self.scaling not in ("default", "linear")  # longrope divides by its logarithm
        whole("rope original_max_position", self.original_max_position, least=2 if stretched else 0)
        if self.attention_factor is not None:
            real("rope attention_factor", self.attention_factor)
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name):  # 0 is the same as none
                real(f"rope {name}", getattr(self, name))
        for name in ("short_factor", "long_factor"):
            for value in getattr(self, name) or ():
                real(f"rope {name}", value)


def inverse_frequencies(
    rope: RopeSpec, *, max_model_len: int, weights: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, float]:
    """Angle per position of each rotated pair, [dim / 2] float32, and the factor on cos and sin.

    `weights` may carry a GGUF's factors: rope_freqs.weight, rope_factors_{long,short}.weight, each [dim / 2].
    Raises CorruptFileError where factors are missing or have another length. Formulas as in transformers.
    """
    exponents = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    inverse = rope.theta**-exponents
    attention_factor = 1.0
    if rope.scaling == "linear":
        inverse = inverse / rope.factor
    elif rope.scaling == "dynamic":
        stretch = max(max_model_len, rope.original_max_position) / rope.original_max_position
        base = rope.theta * (rope.factor * stretch - (rope.factor - 1)) ** (rope.dim / (rope.dim - 2))
        inverse = base**-exponents
    elif rope.scaling == "llama3":
        inverse = _llama3(inverse, rope)
    elif rope.scaling == "yarn":
        inverse, attention_factor = _yarn(inverse, rope), _yarn_attention_factor(rope)
    elif rope.scaling == "longrope":
        kind = "long" if max_model_len > rope.original_max_position else "short"
        factors = rope.long_factor if kind == "long" else rope.short_factor
        inverse = inverse / _factors(factors, weights, f"rope_factors_{kind}.weight", len(inverse))
        attention_factor = _longrope_attention_factor(rope)
    if "rope_freqs.weight" in weights:
        inverse = inverse / _factors(None, weights, "rope_freqs.weight", len(inverse))
    return inverse.astype(np.float32), attention_factor


def _factors(
    given: tuple[float, ...] | None, weights: Mapping[str, np.ndarray], name: str, expected: int
) -> np.ndarray:
    if given is None and name not in weights:
        raise CorruptFileError(f"the model scales its positions but has no {name}: convert or download it again.")
    factors = np.asarray(weights[name] if given is None else given, dtype=np.float64)
    if factors.shape != (expected,):
        raise CorruptFileError(f"{name} must hold {expected} factors; got shape {factors.shape}: download it again.")
    return factors


def _llama3(inverse: np.ndarray, rope: RopeSpec) -> np.ndarray:
    wavelength = 2 * math.pi / inverse
    ratio = rope.original_max_position / wavelength
    smooth = np.clip(
        (ratio - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0
    )  # 0 = stretched fully, 1 = left alone
    return (1 - smooth) * inverse / rope.factor + smooth * inverse


def _yarn(inverse: np.ndarray, rope: RopeSpec) -> np.ndarray:
    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero
    ramp = np.clip((np.arange(rope.dim // 2) - low) / (high - low), 0.0, 1.0)
    return inverse / rope.factor * ramp + inverse * (1 - ramp)


def _yarn_attention_factor(rope: RopeSpec) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _longrope_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
