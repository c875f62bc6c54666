"""Packed weights against the gguf package's own dequantisation, and the errors of rounding floats."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

_native = pytest.importorskip("paceline._native")

from paceline.models.gguf_file import TENSOR_TYPES  # noqa: E402

# Offsets of the float16 fields in a block; every other bit pattern is valid.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
FLOATS = {"F32": np.float32, "F16": np.float16}
EXTREME_HALVES = np.array([0, -0.0, 6e-8, -6e-8, 6.1e-5, 1, -1, 4094, -4094], np.float16)  # × 16 is still finite


def random_rows(kind: str, outputs: int, inputs: int, *, seed: int) -> np.ndarray:
    """uint8 [outputs, bytes of a row]: random quants, scales from subnormal to large."""
    rng = np.random.default_rng(seed)
    if kind in FLOATS:
        return rng.standard_normal((outputs, inputs)).astype(FLOATS[kind]).view(np.uint8)
    if kind == "BF16":
        return (
            (rng.standard_normal((outputs, inputs)).astype(np.float32).view(np.uint32) >> 16).astype("<u2").view("u1")
        )
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (outputs * inputs // block, block_bytes), np.uint8)
    for offset in HALVES[kind]:
        scales = rng.standard_normal(len(blocks)).astype(np.float16)
        extreme = rng.random(len(blocks)) < 0.3
        scales[extreme] = rng.choice(EXTREME_HALVES, extreme.sum())
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(outputs, -1)


def dequantized(kind: str, rows: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]).astype(np.float32)


def shapes(kind: str) -> list[tuple[int, int]]:
    """Outputs that do and do not fill panels, inputs that are an odd number of blocks."""
    if kind in (*FLOATS, "BF16"):
        return [(1, 1), (16, 32), (37, 45)]
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    return [(1, block), (16, 3 * block), (37, 5 * block)]


@pytest.mark.parametrize("kind", TENSOR_TYPES)
def test_every_type_unpacks_to_the_reference_bits(kind):
    for seed, (outputs, inputs) in enumerate(shapes(kind)):
        rows = random_rows(kind, outputs, inputs, seed=seed)
        packed = _native.pack_ggml(kind, rows.reshape(-1), outputs, inputs)
        assert (packed.outputs, packed.inputs, packed.format) == (outputs, inputs, _native.packed_format(kind))
        np.testing.assert_array_equal(packed.unpack(), dequantized(kind, rows))


@pytest.mark.parametrize("kind", TENSOR_TYPES)
def test_rows_are_taken_in_the_order_that_is_asked_for(kind):
    outputs, inputs = shapes(kind)[-1]
    rows = random_rows(kind, outputs, inputs, seed=9)
    order = np.random.default_rng(9).permutation(outputs)[: outputs - 5].astype(np.int32)
    packed = _native.pack_ggml(kind, rows.reshape(-1), len(order), inputs, order)
    np.testing.assert_array_equal(packed.unpack(), dequantized(kind, rows)[order])


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q4_1", "Q6_K", "Q8_0"])
def test_threads_pack_what_one_does(kind):
    rows = random_rows(kind, 1040, 1024, seed=3)
    np.testing.assert_array_equal(
        _native.pack_ggml(kind, rows.reshape(-1), 1040, 1024).unpack(), dequantized(kind, rows)
    )


@pytest.mark.parametrize("kind", TENSOR_TYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_reported(kind, bad):
    outputs, inputs = shapes(kind)[-1]
    for offset in HALVES.get(kind, [0]):
        rows = random_rows(kind, outputs, inputs, seed=1)
        bits = np.array([bad], np.float32 if kind in ("F32", "BF16") else np.float16).view(np.uint8)
        bits = bits[2:] if kind == "BF16" else bits
        rows[outputs - 1, offset : offset + len(bits)] = bits
        with pytest.raises(ValueError, match="NaN or infinite"):
            _native.pack_ggml(kind, rows.reshape(-1), outputs, inputs)


def test_what_does_not_fit_is_refused():
    blocks = np.zeros(20 * 4, np.uint8)  # four rows of one Q4_1 block
    for arguments in [
        ("Q4_1", blocks, 3, 32), ("Q4_1", blocks[:-1], 4, 32), ("Q4_1", blocks, 4, 31), ("Q4_1", blocks, 0, 32),
        ("Q9_9", blocks, 4, 32), ("Q4_1", blocks, 2, 32, np.array([0, 4], np.int32)),
        ("Q4_1", blocks, 2, 32, np.array([-1, 0], np.int32)), ("Q4_1", blocks, 3, 32, np.array([0, 1], np.int32)),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=r"\w"):
            _native.pack_ggml(*arguments)
    with pytest.raises(ValueError, match="floats cannot be packed as q6_k"):
        _native.pack_floats(np.zeros((1, 1), np.float32), "q6_k")
    with pytest.raises(ValueError, match="no packed format is called q9"):
        _native.pack_floats(np.zeros((1, 1), np.float32), "q9")


def random_floats(seed: int, outputs: int = 37, inputs: int = 45) -> np.ndarray:
    """Rows of very different magnitudes, one of zeros, one constant."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((outputs, inputs)) * np.exp(rng.uniform(-12, 8, (outputs, 1)))
    values[3], values[5] = 0, 0.3
    return values.astype(np.float32)


def test_floats_are_rounded_to_nearest_even():
    every_half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = every_half[np.isfinite(every_half)].astype(np.float32)
    between = (halves[:-1] + halves[1:]) / 2  # ties, for neighbours
    values = np.concatenate([halves, between, np.nextafter(between, np.float32(np.inf))])
    values = np.concatenate([values, random_floats(0, 64, 64).reshape(-1)]).reshape(1, -1)
    np.testing.assert_array_equal(_native.pack_floats(values, "f32").unpack(), values)
    np.testing.assert_array_equal(_native.pack_floats(values, "f16").unpack(), values.astype(np.float16))
    bits = values.view(np.uint32).astype(np.uint64)
    bfloat16 = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(_native.pack_floats(values, "bf16").unpack(), bfloat16)


def test_int8_is_within_half_a_step():
    values = random_floats(1)
    step = np.abs(values).max(axis=1, keepdims=True) / 127
    assert (np.abs(_native.pack_floats(values, "i8").unpack() - values) <= step * 0.50002).all()


def test_int4_is_better_than_cutting_the_range_into_fifteen_steps():
    values = random_floats(2, outputs=64, inputs=32 * 7)
    unpacked = _native.pack_floats(values, "q4_1").unpack()
    groups = values.reshape(64, 7, 32)
    kind = gguf.GGMLQuantizationType.Q4_1
    plain = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    error = ((unpacked - values).reshape(groups.shape) ** 2).sum(-1)
    plain_error = ((plain - values).reshape(groups.shape) ** 2).sum(-1)
    assert (error <= plain_error * 1.0001 + 1e-12).all()
    assert error[:, :].sum() < 0.93 * plain_error.sum()
    step = np.ptp(groups, axis=-1) / 15
    assert (np.abs((unpacked - values).reshape(groups.shape)).max(-1) <= 1.6 * step + 1e-4).all()


def test_int4_of_a_row_depends_on_that_row_alone():
    values = random_floats(6)
    unpacked = _native.pack_floats(values, "q4_1").unpack()
    for row in (0, 16, 36):
        np.testing.assert_array_equal(_native.pack_floats(values[row : row + 1], "q4_1").unpack()[0], unpacked[row])


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "i8", "q4_1"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_floats_that_are_not_finite_are_reported(name, bad):
    values = random_floats(5)
    values[36, 44] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        _native.pack_floats(values, name)


def test_matrices_that_come_and_go_keep_out_of_each_others_memory():
    """Small ones are cut from common pages, and the last one's place is taken again."""
    rng = np.random.default_rng(7)
    kept: list[tuple[object, np.ndarray]] = []
    for _ in range(400):
        values = rng.standard_normal((int(rng.integers(1, 300)), int(rng.integers(1, 700)))).astype(np.float32)
        kept.append((_native.pack_floats(values, "f32"), values))
        for _ in range(int(rng.integers(0, 3))):
            if kept:
                kept.pop(-1 if rng.random() < 0.7 else int(rng.integers(len(kept))))
    assert kept
    for packed, values in kept:
        np.testing.assert_array_equal(packed.unpack(), values)
