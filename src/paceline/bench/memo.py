"""Results that outlive an interruption: each is computed once and kept in a JSON file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import CorruptFileError
from paceline.models.json_file import read_json, write_json


class Memo:
    """Values by name, in a file that is written after each new one.

    key: what all values depend on; a file with another one counts as none. So does a damaged file, as `damaged` tells:
    its values bear a checksum, so that whoever takes one out need not doubt it. Values are what JSON can hold.
    """

    def __init__(self, path: Path, *, key: str) -> None:
        self._path = path
        self._key = key
        try:
            self._values, self.damaged = _read(path, key=key), False
        except (CorruptFileError, TypeError, KeyError):
            self._values, self.damaged = {}, True

    def __len__(self) -> int:
        return len(self._values)

    def __call__(self, name: str, compute: Callable[[], Any]) -> Any:
        """The value of that name; computed and kept if there is none."""
        if name not in self._values:
            self._values[name] = compute()
            checksum = _checksum(self._values)
            write_json(self._path, {"key": self._key, "checksum": checksum, "values": self._values})
        return self._values[name]

    def forget(self) -> None:
        """Deletes the file."""
        self._path.unlink(missing_ok=True)


def _read(path: Path, *, key: str) -> dict[str, Any]:
    """Raises CorruptFileError, TypeError or KeyError for a damaged file."""
    found = read_json(path)
    if found is None or found["key"] != key:
        return {}
    if found["checksum"] != _checksum(found["values"]):
        raise CorruptFileError(f"the values in {path} are not those that were written.")
    return found["values"]


def _checksum(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
