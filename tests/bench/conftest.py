"""The scripts of benchmarks/ as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """benchmarks/NAME.py for tests in test_NAME.py."""
    name = request.path.stem.removeprefix("test_")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module(name)
    sys.modules.pop("results_file", None)
    del sys.modules[name]
