"""Checks of the numbers in a config.json or in GGUF metadata; each raises CorruptFileError that names the field."""

from __future__ import annotations

import sys
from typing import Any

from paceline.errors import CorruptFileError

_REMEDY = "download the model again"


def whole(name: str, value: Any, *, least: int = 1) -> int:
    """The value, an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CorruptFileError(
            f"the model's {name} must be an integer of at least {least}; got {value!r:.80}: {_REMEDY}."
        )
    return value


def real(name: str, value: Any, *, above: float = 0.0) -> float:
    """The value, a finite number greater than `above`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not above < value <= sys.float_info.max:
        raise CorruptFileError(f"the model's {name} must be a number above {above:g}; got {value!r:.80}: {_REMEDY}.")
    return value
