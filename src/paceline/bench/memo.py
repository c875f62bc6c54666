"""Results that outlive an interruption: each is computed once and kept in a JSON file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.models.json_file import read_json, write_json


class Memo:
    """Values by name, in a file that is written after each new one. A file with another key counts as none.

    key: what all values depend on. Values are what JSON can hold. Raises CorruptFileError for a file that is not JSON.
    """

    def __init__(self, path: Path, *, key: str) -> None:
        self._path = path
        self._key = key
        found = read_json(path)
        mine = isinstance(found, dict) and found.get("key") == key
        self._values: dict[str, Any] = found["values"] if mine else {}

    def __len__(self) -> int:
        return len(self._values)

    def __call__(self, name: str, compute: Callable[[], Any]) -> Any:
        """The value of that name; computed and kept if there is none."""
        if name not in self._values:
            self._values[name] = compute()
            write_json(self._path, {"key": self._key, "values": self._values})
        return self._values[name]

    def forget(self) -> None:
        """Deletes the file."""
        self._path.unlink(missing_ok=True)
