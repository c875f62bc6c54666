"""Live servers that tests share: a toy model of characters, and SmolLM2 on the native engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live import Live, serving

from paceline.draft.ngram import NgramDrafter
from paceline.engine.traced import TracedEngine
from paceline.testing import CharTokenizer, ToyModel
from toy_engine import make_engine

TOKENIZER = CharTokenizer()


def toy(*, runner=None, tokenizer=TOKENIZER, **options):
    """An engine of printable characters, whose texts repeat enough for its drafter to be right at times."""
    runner = runner or ToyModel(
        vocab_size=TOKENIZER.vocab_size,
        seed=3,
        order=1,
        num_blocks=1024,
        block_size=4,
        max_model_len=1024,
        peakedness=3.0,
    )
    return make_engine(tokenizer=tokenizer, runner=runner, kind=TracedEngine, **options)


@pytest.fixture(scope="session")
def toy_server() -> Iterator[Live]:
    with serving(toy(drafter=NgramDrafter(max_ngram=2, min_ngram=1))) as live:
        yield live
