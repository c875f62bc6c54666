"""Reasoning, which some models write before their answer as <think>...</think>, apart from it: also as it arrives."""

from __future__ import annotations

from paceline.serve.tags import split_at

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Takes a text in pieces, and tells its reasoning from its answer; line feeds around the tags are dropped.

    opened: the prompt ends with the opening tag, so the text begins within the reasoning.
    """

    def __init__(self, *, opened: bool) -> None:
        self._state = "inside" if opened else "undecided"
        self._buffer = ""
        self._at_start = True  # of the reasoning or the answer: line feeds are dropped

    def feed(self, text: str) -> tuple[str, str]:
        """What the piece adds to the reasoning, and to the answer."""
        self._buffer += text
        if self._state == "undecided":
            start = self._buffer.lstrip()
            if OPEN.startswith(start):
                return "", ""
            if start.startswith(OPEN):
                self._state, self._buffer = "inside", start[len(OPEN) :]
            else:
                self._state, self._at_start = "answer", False
        reasoning = self._reasoning() if self._state == "inside" else ""
        answer = self._answer() if self._state == "answer" else ""
        return reasoning, answer

    def close(self) -> tuple[str, str]:
        """What was held back, once the text is over."""
        held, self._buffer = self._buffer, ""
        if self._state == "inside":
            return held.rstrip("\n"), ""
        return "", held

    def _reasoning(self) -> str:
        before, rest, found = split_at(self._buffer, CLOSE)
        if self._at_start:
            before = before.lstrip("\n")
        kept = before.rstrip("\n")  # those before the closing tag, if it comes now, are dropped
        if found:
            self._state, self._at_start, self._buffer = "answer", True, rest
        else:
            self._buffer = before[len(kept) :] + rest
            self._at_start = self._at_start and not kept
        return kept

    def _answer(self) -> str:
        text = self._buffer.lstrip("\n") if self._at_start else self._buffer
        self._buffer = ""
        self._at_start = self._at_start and not text
        return text
