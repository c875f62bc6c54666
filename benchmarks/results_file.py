"""Where benchmarks keep what they found, results/NAME.json, and how its tables come into the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent


def name_of(model: str) -> str:
    """What stands for a model in the names of files: its short name, or that of its file or folder."""
    return Path(model).name.removesuffix(".gguf")


def read(name: str) -> dict[str, Any]:
    """An earlier run's; empty if there is none."""
    path = HERE / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def keep(results: dict[str, Any], name: str) -> None:
    path = HERE / "results" / f"{name}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def renew(page: str, table: str, *, name: str) -> None:
    """Puts a table between the markers of that name in a page, such as docs/drafters.md."""
    path = ROOT / page
    path.write_text(paste(path.read_text(encoding="utf-8"), table, name=name), encoding="utf-8")


def paste(text: str, table: str, *, name: str) -> str:
    """The text with the table between the markers of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{table}\n{end}{tail}"
