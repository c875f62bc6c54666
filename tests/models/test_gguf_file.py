"""GGUF reading against the gguf package's own reader, and what it makes of damaged files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_writing import finish, write_tiny_gguf
from paceline.errors import CorruptFileError, ModelError, UnsupportedModelError
from paceline.models.gguf_file import TENSOR_TYPES, GGUFFile
from paceline.models.loader import load


def _write(path: Path, *, tensors: dict[str, tuple[np.ndarray, str]] | None = None, **metadata) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        adders = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float64, bool: writer.add_bool}
        adders.get(type(value), writer.add_array)(key, value)
    for name, (raw, type_name) in (tensors or {}).items():
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[type_name])
    finish(writer)
    return path


def _random_blocks(type_name: str, rng: np.random.Generator) -> np.ndarray:
    """Raw bytes of a tensor of 3 rows of 512, with scales that are ordinary numbers."""
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        return gguf.quantize(rng.standard_normal((3, 512)).astype(np.float32), kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (3, 512 // block, block_bytes), dtype=np.uint8)
    scales = rng.uniform(0.01, 1, (3, 512 // block, 2)).astype(np.float16).view(np.uint8)
    start = {"Q2_K": 80, "Q3_K": 108, "Q4_K": 0, "Q5_K": 0, "Q6_K": 208}[type_name]
    width = min(4, block_bytes - start)
    raw[..., start : start + width] = scales[..., :width]
    return raw.reshape(3, -1)


@pytest.mark.parametrize("type_name", TENSOR_TYPES)
def test_values_are_the_gguf_packages(type_name, tmp_path):
    raw = _random_blocks(type_name, np.random.default_rng(0))
    path = _write(tmp_path / "a.gguf", tensors={"first": (np.ones((1, 7), np.float32), "F32"), "x": (raw, type_name)})
    tensor = gguf.GGUFReader(path).tensors[1]
    expected = gguf.dequantize(tensor.data, tensor.tensor_type)
    file = GGUFFile(path)
    assert file.shapes == {"first": (1, 7), "x": (3, 512)}
    values = file.read("x")
    assert values.dtype == np.float32
    assert np.isfinite(values).all()
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(file.read("x", rows=np.array([2, 0])), expected[[2, 0]])


def test_vectors_in_blocks(tmp_path):
    values = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    file = GGUFFile(_write(tmp_path / "a.gguf", tensors={"x": (raw, "Q8_0"), "y": (values, "F32")}))
    assert file.shapes == {"x": (64,), "y": (64,)}
    np.testing.assert_allclose(file.read("x"), values, atol=0.02)
    np.testing.assert_array_equal(file.read("x", rows=np.arange(5, 40)), file.read("x")[5:40])
    np.testing.assert_array_equal(file.read("y", rows=np.arange(5, 40)), values[5:40])


def test_metadata_of_every_kind(tmp_path):
    values = {"s": "ä\n", "i": 7, "f": 0.1, "b": True, "strings": ["", "x", "é"], "ints": [1, -2], "floats": [0.5, 2.0]}
    metadata = GGUFFile(_write(tmp_path / "a.gguf", **values)).metadata
    assert {key: metadata[key] for key in values} == values
    assert type(metadata["b"]) is bool


def test_unsupported_tensor_type_is_named(tmp_path):
    path = _write(tmp_path / "b.gguf", tensors={"x": (np.zeros((1, 256), np.float32), "F32")})
    data = path.read_bytes()
    number = data.index(b"x", data.index(b"llama")) + 1 + 4 + 16  # name, dimension count, two dimensions
    assert data[number] == 0
    path.write_bytes(data[:number] + bytes([gguf.GGMLQuantizationType.IQ1_S]) + data[number + 1 :])
    with pytest.raises(UnsupportedModelError, match=r"'x' has type IQ1_S; supported are F32, .*Q6_K"):
        GGUFFile(path)


def _damaged(data: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "magic": b"GGML" + data[4:],
        "tensor count": data[:8] + b"\xff" * 8 + data[16:],
        "key count": data[:16] + b"\xff" * 7 + b"\x7f" + data[24:],
        "string length": data[:24] + b"\xff" * 8 + data[32:],
        "header only": data[:24],
        "one byte short": data[:-1],
        "half": data[: len(data) // 2],
    }


@pytest.mark.parametrize("damage", _damaged(b""))
def test_damaged_files_are_one_line_errors(damage, tmp_path):
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path)
    path.write_bytes(_damaged(path.read_bytes())[damage])
    with pytest.raises(CorruptFileError, match=r"model\.gguf .*download it again\.$") as caught:
        load(str(path))
    assert "\n" not in str(caught.value)


def test_truncation_at_any_length(tmp_path):
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path)
    data = path.read_bytes()
    for length in np.random.default_rng(0).integers(0, len(data), 150):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptFileError):
            GGUFFile(path)


def test_flipped_header_bytes_never_give_a_raw_traceback(tmp_path):
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path)
    data = path.read_bytes()
    header = len(data) - sum(tensor.num_bytes for tensor in GGUFFile(path).tensors.values())
    rng = np.random.default_rng(1)
    outcomes = []
    for _ in range(400):
        damaged = bytearray(data)
        for position in rng.integers(0, header, rng.integers(1, 4)):
            damaged[position] = rng.integers(0, 256)
        path.write_bytes(damaged)
        outcomes.append(_outcome(path))
    assert not any("\n" in outcome for outcome in outcomes)
    assert sum(outcome == "loaded" for outcome in outcomes) < 300  # such a flip hit a name, a number or padding


def _outcome(path: Path) -> str:
    """ "loaded" or the message; any error but ours goes through and fails the test."""
    try:
        load(str(path))
    except ModelError as error:
        return str(error)
    return "loaded"


def test_absurd_layer_count_is_refused_at_once(tmp_path):
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path)
    data = path.read_bytes()
    position = data.index(b"llama.block_count") + len("llama.block_count") + 4
    path.write_bytes(data[:position] + b"\xff\xff\xff\x7f" + data[position + 4 :])
    with pytest.raises(CorruptFileError, match="announces 2147483647 layers but has 11 tensors"):
        load(str(path))
