"""The compiled extension, where it is built: some drafters leave it what they do in each step."""

from __future__ import annotations

try:
    from paceline import _native as native
except ImportError:
    native = None

__all__ = ["native"]
