"""Models that tests share: a tiny Llama written on the spot, and SmolLM2, fetched once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_llama import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """Folder of a tiny instruct model: loads in a blink, answers gibberish, 512 tokens of context."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory) -> Path:
    """The same without a chat template."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-base", template=None)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, fetched into the cache folder if it is not there."""
    from paceline.models.catalog import resolve

    return resolve("smollm2-135m", progress=False)


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct, loaded once; pass it to LLM in place of a name."""
    from paceline.models.loader import load

    return load("smollm2-135m", progress=False)
