"""The loader as a whole: what a caller gets, and what goes wrong on the way."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from gguf_writing import write_tiny_gguf
from paceline.errors import CorruptFileError, UnsupportedModelError
from paceline.models.loader import LoadedModel, load


def test_folder(tiny_llama):
    model = load(str(tiny_llama))
    assert model.path == tiny_llama
    assert model.precision == "float32 safetensors"
    assert model.spec.architecture == "llama"
    assert model.weights["model.embed_tokens.weight"].shape == (model.spec.vocab_size, model.spec.hidden_size)
    assert model.tokenizer.decode(model.tokenizer.encode("hello")) == "hello"


def test_gguf(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    model = load(str(tmp_path / "tiny.gguf"))
    assert (model.spec.num_layers, model.spec.num_heads, model.spec.num_kv_heads) == (1, 2, 1)
    assert model.precision == "float32 GGUF"
    assert model.tokenizer.eos_ids == {0, 2}
    assert model.tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<|im_start|>user\nx<|im_end|>\n"


def test_made_by_hand(tiny_llama):
    model = load(str(tiny_llama))
    copy = LoadedModel(
        name="mine", path=tiny_llama, spec=model.spec, tokenizer=model.tokenizer, precision="float32",
        weights={name: np.array(values) for name, values in model.weights.items()},
    )  # fmt: skip
    assert copy.weights.keys() == model.weights.keys()


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("config.json", "{", CorruptFileError, "config.json is malformed"),
        ("config.json", "[]", CorruptFileError, "config.json is malformed"),
        ("config.json", "[" * 100_000, CorruptFileError, "config.json is malformed"),
        ("config.json", '{"architectures": {"a": 1}, "model_type": "llama"}', CorruptFileError, "architectures"),
        ("config.json", '{"model_type": "mamba"}', UnsupportedModelError, "architecture 'mamba' is not supported"),
        ("model.safetensors", None, UnsupportedModelError, "convert the model to safetensors"),
        ("model.safetensors", "", CorruptFileError, "not a readable safetensors file"),
        ("tokenizer.json", None, CorruptFileError, r"has no tokenizer\.json"),
        ("tokenizer.json", "{}", CorruptFileError, r"tokenizer\.json is malformed"),
    ],
)
def test_damaged_folders(name, content, error, message, tiny_llama, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "m")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(error, match=message) as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)


def test_absurd_layer_count(tiny_llama, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 10**9}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptFileError, match="announces 1000000000 layers"):
        load(str(folder))


def test_loading_needs_neither_torch_nor_transformers(tiny_llama, tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    code = (
        "import sys; from paceline.models.loader import load\n"
        f"for path in {[str(tiny_llama), str(tmp_path / 'tiny.gguf')]!r}: [*load(path).weights.values()]\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "architecture", "precision"),
    [
        ("qwen2.5-coder-1.5b", "qwen2", "4-bit GGUF (Q4_K_M, head Q6_K)"),
        ("gemma3-270m", "gemma3", "4-bit GGUF (Q4_K_M, head Q8_0)"),
    ],
)
def test_catalog_models(name, architecture, precision):
    model = load(name, progress=False)
    assert (model.spec.architecture, model.precision) == (architecture, precision)
    for tensor, values in model.weights.items():
        assert np.isfinite(values).all(), tensor
