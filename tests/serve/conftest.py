"""A live server that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from live_server import Live, serving, toy
from paceline.draft.ngram import NgramDrafter


@pytest.fixture(scope="session")
def toy_server() -> Iterator[Live]:
    with serving(toy(drafter=NgramDrafter(max_ngram=2, min_ngram=1))) as live:
        yield live
