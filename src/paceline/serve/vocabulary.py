"""Tokens as text and as bytes, for log-probabilities."""

from __future__ import annotations

from functools import cached_property

from paceline.interfaces import Tokenizer


class Vocabulary:
    """The texts of single tokens; the bytes of all are worked out once, when the first are asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """What the token adds to a text; part of a character becomes U+FFFD."""
        return self._tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> bytes:
        """The same, to the byte; of a special token its name's."""
        known = self._bytes[token_id] if token_id < len(self._bytes) else None
        return self.text(token_id).encode() if known is None else known

    @cached_property
    def _bytes(self) -> list[bytes | None]:
        return self._tokenizer.token_bytes()
