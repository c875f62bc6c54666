"""The marker that a grammar starts after: found in the bytes of the tokens, wherever it lies in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Marker:
    """A text before which all tokens are free. Immutable.

    What is known of the free text is its end, as far as it is a beginning of the marker. A token can hold the end of
    the marker and a beginning of what follows, the rest: it is allowed only if the grammar may begin with that.
    """

    def __init__(
        self, text: str, spellings: Sequence[bytes], spell: Callable[[bytes], list[int]], matcher: LLMatcher
    ) -> None:
        self._text = text.encode()
        self._spellings = spellings
        self._spell = spell
        last = self._text[-1:]
        self._ending = [  # tokens that can hold the marker's end and more
            token_id for token_id, spelling in enumerate(spellings) if last in spelling[:-1]
        ]
        begun = [self._text[:length] for length in range(len(self._text))]
        self._allowed = {known: self._allowed_after(known, matcher) for known in begun}

    def follow(self, known: bytes, token_id: int) -> tuple[bytes | None, list[int]]:
        """What is known once a token was added to a free text, None if that ended the marker, and then the token's rest
        in tokens."""
        seen = known + self._spellings[token_id]
        at = seen.find(self._text)
        if at >= 0:
            return None, self._spell(seen[at + len(self._text) :])
        for length in range(min(len(self._text) - 1, len(seen)), 0, -1):
            if seen.endswith(self._text[:length]):
                return self._text[:length], []
        return b"", []

    def allowed(self, known: bytes) -> np.ndarray:
        """Bit mask [ceil(V/8)] uint8 of the tokens that may follow a free text."""
        return self._allowed[known]

    def _allowed_after(self, known: bytes, matcher: LLMatcher) -> np.ndarray:
        allowed = np.ones(len(self._spellings), dtype=bool)
        for token_id in self._ending:
            _, _, rest = (known + self._spellings[token_id]).partition(self._text)
            if rest:
                tokens = self._spell(rest)
                allowed[token_id] = bool(tokens) and matcher.validate_tokens(tokens) == len(tokens)
        return np.packbits(allowed, bitorder="little")
