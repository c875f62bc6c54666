"""Counter-based random words: any word of any row in any order, the same in every engine. docs/noise.md tells why.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Key = the 64-bit seed, low
word first; counter = (token // 4, position, stream, purpose | attempt << 3); the token's word is lane token % 4.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Purposes. SAMPLE words are drawn once a position, whatever the step (attempt 0), so that plain decoding, the target's
# sample under `coupled` and a drafter that shares its noise all see the same ones. The others take fresh words in each
# step (attempt = the request's step): redrawing a position with old words would bias `block`.
SAMPLE, DRAFT, COIN, RESIDUAL = 0, 1, 2, 3

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10
_FEW_BLOCKS = 2  # up to here plain integers beat the calls of NumPy
_SCALAR_ROUNDS = 3  # rounds after which a counter that varies in one word only has spread to all four


def purpose_word(purpose: int, attempt: int = 0) -> int:
    """The counter word of a purpose in a step, as RowSampling.purpose wants it."""
    return (purpose | attempt << 3) & _MASK


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox-4x32-10 of counter [..., 4] uint32 under key [..., 2] uint32: words [..., 4] uint32."""
    counters = np.asarray(counter, dtype=np.uint64)
    keys = np.asarray(key, dtype=np.uint64)
    shape = np.broadcast_shapes(counters.shape[:-1], keys.shape[:-1])
    lanes = [
        np.broadcast_to(lane, shape).reshape(-1) for lane in (*np.moveaxis(counters, -1, 0), *np.moveaxis(keys, -1, 0))
    ]
    return _philox(*lanes).reshape(*shape, 4)


def words(blocks: np.ndarray, *, seed: Any, stream: Any, position: Any, purpose: Any) -> np.ndarray:
    """Words of the tokens 4 * block .. 4 * block + 3, for blocks [...] : [..., 4] uint32.

    seed (64 bits), stream, position and purpose (purpose_word) are integers, or uint64 arrays that broadcast with
    blocks: one row and many tokens, many rows and the same tokens, or a row for each block.
    """
    blocks = np.asarray(blocks, dtype=np.uint64)
    return _philox(blocks, position, stream, purpose, seed & _MASK, seed >> 32)


def row_words(vocab_size: int, *, seed: int, stream: int, position: int, purpose: int) -> np.ndarray:
    """Words of the tokens 0..V-1 of one row: [V] uint32."""
    num_blocks = (vocab_size + 3) // 4
    if num_blocks <= _FEW_BLOCKS:
        key = int(seed) & _MASK, int(seed) >> 32
        drawn = [_scalar_philox(block, int(position), int(stream), int(purpose), *key) for block in range(num_blocks)]
        return np.array(drawn, dtype=np.uint32).reshape(-1)[:vocab_size]
    blocks = np.arange(num_blocks, dtype=np.uint64)
    drawn = words(blocks, seed=int(seed), stream=int(stream), position=int(position), purpose=int(purpose))
    return drawn.reshape(-1)[:vocab_size]


def to_uniform(drawn: np.ndarray) -> np.ndarray:
    """Words x as u = (x + 0.5) / 2^32 in (0, 1), float64, where each is exact."""
    uniforms = drawn.astype(np.float64)
    uniforms += 0.5
    uniforms *= 2.0**-32
    return uniforms


class PhiloxNoise:
    """The noise of one request and choice (interfaces.Noise)."""

    def __init__(self, seed: int, stream: int = 0) -> None:
        self._seed = int(seed)
        self._stream = int(stream)

    def uniforms(self, *, position: int, purpose: int, attempt: int, vocab_size: int) -> np.ndarray:
        """u in (0, 1) of every token: [V] float64."""
        word = purpose_word(purpose, attempt)
        return to_uniform(row_words(vocab_size, seed=self._seed, stream=self._stream, position=position, purpose=word))

    def uniform(self, *, position: int, purpose: int, attempt: int) -> float:
        """One u in (0, 1), the word of token 0: a coin."""
        counter = 0, int(position), self._stream, purpose_word(purpose, attempt)
        return (_scalar_philox(*counter, self._seed & _MASK, self._seed >> 32)[0] + 0.5) * 2.0**-32


def _round(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """One round on Python integers or uint64 arrays whose values fit in 32 bits."""
    product_0 = c0 * _MULTIPLIER_0
    product_1 = c2 * _MULTIPLIER_1
    return (product_1 >> 32) ^ c1 ^ k0, product_1 & _MASK, (product_0 >> 32) ^ c3 ^ k1, product_0 & _MASK


def _next_key(k0: Any, k1: Any) -> tuple[Any, Any]:
    return (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK


def _scalar_philox(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> tuple[int, int, int, int]:
    for _ in range(_ROUNDS):
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
        k0, k1 = _next_key(k0, k1)
    return c0, c1, c2, c3


def _philox(c0: np.ndarray, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> np.ndarray:
    # While only token // 4 varies, the other words stay plain integers: the first rounds cost a fraction.
    for _ in range(_SCALAR_ROUNDS):
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
        k0, k1 = _next_key(k0, k1)
    high = np.empty_like(c0)
    for _ in range(_ROUNDS - _SCALAR_ROUNDS):
        np.multiply(c0, _MULTIPLIER_0, out=c0)
        np.multiply(c2, _MULTIPLIER_1, out=c2)
        np.right_shift(c2, 32, out=high)
        np.bitwise_xor(c1, high, out=c1)
        np.bitwise_xor(c1, k0, out=c1)
        np.bitwise_and(c2, _MASK, out=c2)
        np.right_shift(c0, 32, out=high)
        np.bitwise_xor(c3, high, out=c3)
        np.bitwise_xor(c3, k1, out=c3)
        np.bitwise_and(c0, _MASK, out=c0)
        c0, c1, c2, c3 = c1, c2, c3, c0
        k0, k1 = _next_key(k0, k1)
    drawn = np.empty((*c0.shape, 4), dtype=np.uint32)
    for lane, value in enumerate((c0, c1, c2, c3)):
        drawn[..., lane] = value
    return drawn
