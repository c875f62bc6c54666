"""An assistant's message out of a model's text: reasoning, content and tool calls, whole or as the text arrives."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from paceline.serve.calls import CallParser, CallPiece
from paceline.serve.reasoning import ReasoningSplitter


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What the text of an answer may hold besides content."""

    reasons: bool = False  # the model writes its reasoning between tags
    reasoning_opened: bool = False  # and the prompt ends with the opening one
    tools: Set[str] = frozenset()  # the names that it may call

    def parser(self) -> AnswerParser:
        """A fresh one, for one choice."""
        return AnswerParser(self)


class AnswerParser:
    """Takes a text in pieces; each gives a `delta` of a streamed message. Pieces or whole, the sum is the same."""

    def __init__(self, form: AnswerFormat) -> None:
        self._reasoning = ReasoningSplitter(opened=form.reasoning_opened) if form.reasons else None
        self._calls = CallParser(form.tools) if form.tools else None

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    def feed(self, text: str, *, last: bool = False) -> dict[str, Any]:
        """What the piece adds to the message; with last, what was held back, too. Empty if nothing can be told yet."""
        reasoning, content = ("", text) if self._reasoning is None else self._reasoning.feed(text)
        if last and self._reasoning is not None:
            more_reasoning, more = self._reasoning.close()
            reasoning, content = reasoning + more_reasoning, content + more
        calls: list[CallPiece] = []
        if self._calls is not None:
            content, calls = self._calls.feed(content)
            if last:
                more, more_calls = self._calls.close()
                content, calls = content + more, calls + more_calls
        delta: dict[str, Any] = {}
        if reasoning:
            delta["reasoning_content"] = reasoning
        if content:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = [_call_json(piece) for piece in calls]
        return delta


def message(form: AnswerFormat, text: str) -> dict[str, Any]:
    """The whole message of a finished choice."""
    delta = form.parser().feed(text, last=True)
    calls: dict[int, dict[str, Any]] = {}
    for piece in delta.pop("tool_calls", []):
        index = piece.pop("index")
        if index in calls:
            calls[index]["function"]["arguments"] += piece["function"]["arguments"]
        else:
            calls[index] = piece
    content = delta.pop("content", None if calls else "")
    whole = {"role": "assistant", "content": content, "refusal": None, **delta}
    return {**whole, "tool_calls": list(calls.values())} if calls else whole


def _call_json(piece: CallPiece) -> dict[str, Any]:
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}
