"""A growing text in the tokens of another vocabulary."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

_SPACES = b" \t\r\n"
_LONGEST_WORD = 256  # bytes of a text without spaces that are spelled anew with each token, at most
_KEPT_OPEN = 64  # bytes of it that may still be spelled otherwise once it is cut


class RetokenisedText:
    """What has been written so far, as another tokenizer would spell it.

    Tokenizers split a text before a space that follows something else, so all before the last such space is settled;
    what comes after is spelled anew as the text grows, and its last tokens can change.
    """

    def __init__(self, encode: Callable[[str], list[int]], spellings: Sequence[bytes | None], start: list[int]) -> None:
        """encode: tokens of a piece of text. spellings: bytes of each token. start: tokens before any text."""
        self._encode = encode
        self._spellings = spellings
        self._settled = list(start)
        self._open = b""

    def append(self, spelling: bytes) -> None:
        """Goes on with some bytes, which need not be whole characters."""
        self._open += spelling

    def append_special(self, token_id: int | None) -> None:
        """Goes on with a special token, or with one that has no counterpart: all before it is settled."""
        self._settled += self._spell(self._open)
        self._open = b""
        if token_id is not None:
            self._settled.append(token_id)

    def tokens(self) -> list[int] | None:
        """All tokens; None while the last character is not complete."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(self._open)
        if decoder.getstate()[0]:
            return None
        self._settle()
        return self._settled + self._spell(self._open)

    def _settle(self) -> None:
        text = self._open
        split = next((i for i in range(len(text) - 1, 0, -1) if text[i] == 32 and text[i - 1] not in _SPACES), 0)
        if split:
            self._settled += self._spell(text[:split])
            self._open = text[split:]
        elif len(text) > _LONGEST_WORD:
            tokens = self._spell(text)
            while tokens and (len(rest := self._bytes_of(tokens)) > len(text) - _KEPT_OPEN or not _ends_whole(rest)):
                tokens.pop()
            if text.startswith(rest := self._bytes_of(tokens)):
                self._settled += tokens
                self._open = text[len(rest) :]

    def _spell(self, text: bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace")) if text else []

    def _bytes_of(self, tokens: list[int]) -> bytes:
        return b"".join(self._spellings[token_id] or b"" for token_id in tokens)


def _ends_whole(text: bytes) -> bool:
    """No character of a text is cut at its end."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
