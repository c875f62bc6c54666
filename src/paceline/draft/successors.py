"""What the target last said would follow a token, or two tokens, and how often such words came true."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from paceline.draft.successor_rows import CHANGED, CONFIRMED, FIRST, MIX, NUM_PAIRS, NUM_STATES, new_rows
from paceline.errors import ConfigError

_PRIOR_WEIGHT = 10.0
_PRIOR_RATES = (0.5, 0.1, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01)  # of the best successor, the second, ...


class SuccessorTable:
    """Rows of the likeliest successors, best first: one for each token, and one for each of the latest 65,536 pairs.

    A pair that falls on another's place takes it. Rows are numbered: pairs first, then tokens. Each has a kind, which
    tells pairs from tokens and whether its best successor was the same the time before; of each kind is counted how
    often each rank came true. Whole texts are read here; `rows` is for one row at a time.

    successors [rows, width] int32, -1 = unknown; kinds [rows] uint8.
    """

    def __init__(self, *, vocab_size: int, width: int) -> None:
        self._width = width
        self.successors = np.full((NUM_PAIRS + vocab_size, width), -1, dtype=np.int32)
        self.kinds = np.zeros(NUM_PAIRS + vocab_size, dtype=np.uint8)
        self.kinds[NUM_PAIRS:] = NUM_STATES
        self._keys = np.full(NUM_PAIRS, -1, dtype=np.int64)
        self._hits = np.tile(_PRIOR_WEIGHT * np.resize(_PRIOR_RATES, width), (2 * NUM_STATES, 1))  # [kinds, width]
        self._trials = np.full(2 * NUM_STATES, _PRIOR_WEIGHT)
        self.rows = new_rows(**self._arrays())

    def write(self, before: np.ndarray, tokens: np.ndarray, successors: np.ndarray) -> None:
        """Successors [M, width] of tokens [M], each after the token `before` it; the last one wins where some agree."""
        keys = before * MIX + tokens
        slots = keys & (NUM_PAIRS - 1)
        replaced = slots[self._keys[slots] != keys]
        self.successors[replaced] = -1
        self._keys[slots] = keys
        rows = np.concatenate([slots, tokens + NUM_PAIRS])
        successors = np.concatenate([successors, successors])
        old, new = self.successors[rows, 0], successors[:, 0]
        state = np.where(old < 0, FIRST, np.where(old == new, CONFIRMED, CHANGED))
        self.kinds[rows] = state + NUM_STATES * (rows >= NUM_PAIRS)
        self.successors[rows] = successors

    def read_text(self, token_ids: np.ndarray) -> None:
        """What follows each place of a text [T] becomes the best successor there, before those that are known."""
        if len(token_ids) < 3:
            return
        before, tokens, following = (token_ids[i : len(token_ids) - 2 + i].astype(np.int64) for i in range(3))
        keys = before * MIX + tokens
        slots = keys & (NUM_PAIRS - 1)
        rows = self.successors[np.where(self._keys[slots] == keys, slots, tokens + NUM_PAIRS)]
        # Moved to the front: what stood before its old place, or before the last one if it had none, moves back by one.
        found = rows == following[:, None]
        old_place = np.where(found.any(axis=1), found.argmax(axis=1), self._width - 1)
        columns = np.arange(self._width)
        moved = np.take_along_axis(rows, columns - (columns <= old_place[:, None]), axis=1)
        moved[:, 0] = following
        self.write(before, tokens, moved)

    def save(self, path: Path, *, fingerprint: str) -> None:
        """Writes a file that `load` reads, whole or not at all. Raises ConfigError if it cannot be written."""
        partial = _partial(path)
        arrays: dict[str, Any] = {"fingerprint": np.array(fingerprint), **self._arrays()}
        try:
            with partial.open("wb") as file:
                np.savez(file, **arrays)
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ConfigError(
                f"the table {path} cannot be written ({error.strerror}): make room, or give another path."
            ) from error

    def load(self, path: Path, *, fingerprint: str) -> None:
        """Takes over what `save` wrote; fingerprint: of the tokenizer, the file must have the same.

        Raises ConfigError, and leaves the table as it is, if the file is damaged or does not fit.
        """
        arrays = self._arrays()
        try:
            with np.load(path, allow_pickle=False) as file:
                saved = {name: file[name] for name in ("fingerprint", *arrays)}
        except Exception as error:  # zip, deflate and NumPy's headers have a dozen kinds between them
            raise ConfigError(
                f"{path} must be a table of successors; it cannot be read ({type(error).__name__}): delete it, and "
                "it is written anew."
            ) from error
        if str(saved["fingerprint"]) != fingerprint:
            raise ConfigError(
                f"{path} must be of this model's tokenizer; it is another's: delete it, or give another path."
            )
        for name, own in arrays.items():
            if saved[name].shape != own.shape or saved[name].dtype != own.dtype:
                raise ConfigError(
                    f"{path} must hold {name} of shape {own.shape}; got {saved[name].shape}, of another vocabulary "
                    "or version: delete it, or give another path."
                )
        if not self._is_sound(saved):
            raise ConfigError(
                f"{path} must be a table of successors; it holds other values: delete it, and it is written anew."
            )
        for name, own in arrays.items():
            own[...] = saved[name]
        self.rows = new_rows(**self._arrays())  # whose rates are others now

    def _is_sound(self, saved: dict[str, np.ndarray]) -> bool:
        vocab_size = len(self.successors) - NUM_PAIRS
        successors, kinds = saved["successors"], saved["kinds"]
        hits, trials = saved["hits"], saved["trials"]
        return bool(
            successors.min() >= -1
            and successors.max() < vocab_size
            and kinds.max() < 2 * NUM_STATES
            and np.isfinite(trials).all()
            and hits.min() >= 0
            and (hits.sum(axis=1) <= trials).all()
        )

    def _arrays(self) -> dict[str, np.ndarray]:
        return {
            "successors": self.successors,
            "kinds": self.kinds,
            "keys": self._keys,
            "hits": self._hits,
            "trials": self._trials,
        }


def can_save(path: Path) -> bool:
    """Whether `save` could write there now: a name of a length that the disk takes, and no folder, device or pipe."""
    try:
        partial = _partial(path)
        partial.touch()
        partial.unlink()
        return path.is_file() or not path.exists()
    except (OSError, ValueError):
        return False


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.partial")
