"""Text as tokens arrive: whole characters only, and nothing that a stop string may yet swallow."""

from __future__ import annotations

from typing import Protocol

_REPLACEMENT = "\ufffd"  # what an incomplete character decodes to


class Decoder(Protocol):
    """The part of a tokenizer that detokenisation needs."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Turns the output tokens of one choice into text, token by token.

    `text` is the output so far, cut before a stop string once one was found. `take()` returns what can be shown and
    was not taken before: it ends at whole characters and holds back any tail that could grow into a stop string.
    """

    def __init__(self, decoder: Decoder, *, skip_special_tokens: bool, stop: tuple[str, ...] = ()) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._stop = stop
        self._longest_stop = max((len(s) for s in stop), default=0)
        self._ids: list[int] = []
        self._prefix = 0  # decoding starts here: the tokens up to _read are its context, settled before
        self._read = 0  # tokens before this one are in _text
        self._text = ""
        self._taken = 0
        self._closed = False

    @property
    def text(self) -> str:
        return self._text

    def append(self, token_ids: list[int], *, may_stop: bool = True) -> str | None:
        """Adds tokens; returns the stop string that they completed, if any and if the output may stop here.

        Where stop strings are looked for, tokens come one at a time: the output ends with the one that completes.
        """
        self._ids += token_ids
        known = self._decode(self._ids[self._prefix : self._read])
        grown = self._decode(self._ids[self._prefix :])
        if len(grown) <= len(known) or grown.endswith(_REPLACEMENT):
            return None
        self._prefix, self._read = self._read, len(self._ids)
        return self._add(grown[len(known) :], may_stop=may_stop)

    def close(self) -> None:
        """The output is over: an incomplete last character is shown as it decodes, and nothing is held back."""
        if not self._closed and self._read < len(self._ids):
            known = self._decode(self._ids[self._prefix : self._read])
            self._text += self._decode(self._ids[self._prefix :])[len(known) :]
        self._closed = True

    def take(self) -> str:
        """Text that can be shown now and was not taken before."""
        end = len(self._text) if self._closed else len(self._text) - self._held_back()
        taken = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        return taken

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip_special_tokens) if ids else ""

    def _add(self, new: str, *, may_stop: bool) -> str | None:
        start = max(0, len(self._text) - self._longest_stop + 1)
        self._text += new
        if not may_stop:
            return None
        found = [(at, s) for s in self._stop if (at := self._text.find(s, start)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self._text = self._text[:at]
        self._closed = True
        return stop

    def _held_back(self) -> int:
        for length in range(min(self._longest_stop - 1, len(self._text)), 0, -1):
            tail = self._text[-length:]
            if any(s.startswith(tail) for s in self._stop):
                return length
        return 0
