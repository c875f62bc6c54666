"""JSON files of our own: written whole or not at all, and read with an error that helps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from paceline.errors import CorruptFileError


def write_json(path: Path, value: Any) -> None:
    """Replaces the file, creating its folder; an interruption leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        scratch.write_text(json.dumps(value), encoding="utf-8")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """The file's value; None where there is no file. Raises CorruptFileError for what is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not valid JSON ({error}): delete it.") from error
