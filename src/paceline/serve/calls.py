"""Tool calls in a model's text, as Hermes and Qwen write them (<tool_call>JSON</tool_call>) or as plain JSON."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Literal

from paceline.serve.tags import split_at

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FIRST_KEY = re.compile(r'\s*\{\s*(?:"([^"]*)"|[^\s"])')


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What a piece of text adds to a call: its first one has id and name, all add to the arguments, which are JSON."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class CallParser:
    """Takes a text in pieces, and tells calls of the named tools from content. Arguments stream as they are written.

    What looks like a call and turns out to be none is content.
    """

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._state: Literal["text", "call", "arguments", "end"] = "text"  # call: no name yet; end: closes one
        self._buffer = ""
        self._tagged = False  # the call stands between tags
        self._fresh = True  # nothing but white space since the start, or since a call
        self._span = JsonSpan()
        self.num_calls = 0

    def feed(self, text: str) -> tuple[str, list[CallPiece]]:
        """What the piece adds to the content, and to calls."""
        self._buffer += text
        content: list[str] = []
        calls: list[CallPiece] = []
        while self._advance(content, calls):
            pass
        return "".join(content), calls

    def close(self) -> tuple[str, list[CallPiece]]:
        """What was held back, once the text is over."""
        held, self._buffer = self._buffer, ""
        if self._state == "text":
            return ("" if self._fresh and self.num_calls else held), []
        if self._state == "call":
            whole = self._whole(held)
            return ("", [whole]) if whole is not None else ((OPEN if self._tagged else "") + held, [])
        return "", []

    def _advance(self, content: list[str], calls: list[CallPiece]) -> bool:
        """Takes what the state can take off the buffer. False = it waits for more."""
        match self._state:
            case "text":
                return self._text(content, calls)
            case "call":
                return self._call(content, calls)
            case "arguments":
                return self._arguments(calls)
            case "end":
                return self._end()

    def _text(self, content: list[str], calls: list[CallPiece]) -> bool:
        if self._fresh and self._buffer.lstrip().startswith("{"):
            self._begin_call(tagged=False)
            return True
        before, rest, found = split_at(self._buffer, OPEN)
        if self._fresh and not before.strip():
            if not found:
                return False  # white space: dropped if a call follows it
        else:
            content.append(before)
            self._fresh = False
        self._buffer = rest
        if found:
            self._begin_call(tagged=True)
        return found

    def _begin_call(self, *, tagged: bool) -> None:
        self._state, self._tagged = "call", tagged
        self._span = JsonSpan()

    def _call(self, content: list[str], calls: list[CallPiece]) -> bool:
        head = _HEAD.match(self._buffer)
        if head is not None and self._is_known(head[1]):
            calls.append(self._new(head[1], ""))
            self._buffer = self._buffer[head.end() :]
            self._state, self._span = "arguments", JsonSpan()
            return True
        if self._tagged:
            end = self._buffer.find(CLOSE)
            rest = end + len(CLOSE)
        else:
            end = rest = self._span.end(self._buffer)
            first = _FIRST_KEY.match(self._buffer)
            if first is not None and first[1] not in ("name", *_ARGUMENTS):
                end = rest = len(self._buffer)
        if end < 0:
            return False
        whole = self._whole(self._buffer[:end])
        if whole is not None:
            calls.append(whole)
        else:
            content.append((OPEN if self._tagged else "") + self._buffer[:rest])
        self._state, self._buffer, self._fresh = "text", self._buffer[rest:], whole is not None
        return True

    def _arguments(self, calls: list[CallPiece]) -> bool:
        end = self._span.end(self._buffer)
        piece = self._buffer if end < 0 else self._buffer[:end]
        if piece:
            calls.append(CallPiece(self.num_calls - 1, piece))
        self._buffer = self._buffer[len(piece) :]
        self._span.drop(len(piece))
        if end >= 0:
            self._state = "end"
        return end >= 0

    def _end(self) -> bool:
        _, rest, found = split_at(self._buffer, CLOSE if self._tagged else "}")
        self._buffer = rest
        if found:
            self._state, self._fresh = "text", True
        return found

    def _is_known(self, name: str) -> bool:
        return self._tagged or name in self._names  # plain JSON may be just an answer

    def _whole(self, text: str) -> CallPiece | None:
        """A call whose text is complete, in whatever order its keys are."""
        try:
            value: Any = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not self._is_known(name):
            return None
        arguments = next((value[key] for key in _ARGUMENTS if key in value), {} if self._tagged else None)
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments)
        return self._new(name, arguments) if isinstance(arguments, str) else None

    def _new(self, name: str, arguments: str) -> CallPiece:
        self.num_calls += 1
        return CallPiece(self.num_calls - 1, arguments, f"call_{secrets.token_hex(12)}", name)


class JsonSpan:
    """Finds where the first JSON object of a growing text ends; what was looked at is not looked at again."""

    _MARKS = re.compile(r'["\\{}\[\]]')

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False  # the next character stands after a backslash

    def end(self, text: str) -> int:
        """The index after the object, -1 = it has not ended."""
        while self._at < len(text):
            if self._escaped:
                self._at, self._escaped = self._at + 1, False
                continue
            mark = self._MARKS.search(text, self._at)
            self._at = len(text) if mark is None else mark.end()
            if mark is None:
                break
            if mark[0] == "\\":
                self._escaped = self._in_string
            elif mark[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark[0] in "{[" else -1
                if self._depth == 0:
                    return self._at
        return -1

    def drop(self, length: int) -> None:
        """The first characters of the text, all of them looked at, were taken away."""
        self._at -= length
