"""Memo: what was computed is not computed again, unless the file is not its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench.memo import Memo

VALUES = {"a": [1, 2.5, "x"], "b": {"c": None}, "d": 0.1 + 0.2}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memo.json"


def fill(path: Path, key: str = "key") -> Memo:
    memo = Memo(path, key=key)
    for name, value in VALUES.items():
        assert memo(name, lambda value=value: value) == value
    return memo


def never() -> None:
    pytest.fail("it was computed before")


def test_values_outlive_the_memo(path: Path) -> None:
    fill(path)
    memo = Memo(path, key="key")
    assert (len(memo), memo.damaged) == (3, False)
    assert {name: memo(name, never) for name in VALUES} == VALUES


def test_another_key_counts_as_none(path: Path) -> None:
    fill(path)
    memo = Memo(path, key="other")
    assert (len(memo), memo.damaged) == (0, False)


def test_a_changed_value_is_noticed(path: Path) -> None:
    fill(path)
    found = json.loads(path.read_text())
    found["values"]["d"] = 0.3
    path.write_text(json.dumps(found))
    memo = fill(path)
    assert memo.damaged
    assert not Memo(path, key="key").damaged


def test_it_can_be_forgotten(path: Path) -> None:
    fill(path).forget()
    assert not path.exists()
    Memo(path, key="key").forget()
