"""The trace file: JSON lines that tell what each step did to each request, and their reader.

A header comes first, then a line for each request as it is first computed, and one for each of its steps. Lines are
written out step by step, so that an interrupted run leaves whole ones behind, but for the last if it is killed.
"""

from __future__ import annotations

import json
import math
import weakref
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from os import PathLike, fspath
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.errors import ConfigError

FORMAT = 1
Fate = Literal["accepted", "rejected", "not reached"]
_KINDS = ("recovered", "bonus", "plain")


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What ran."""

    format: int  # of the file: FORMAT
    version: str  # of paceline
    model: str  # the model card
    settings: dict[str, Any]  # as in the JSON of a measurement


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request, as it is first computed."""

    request_id: str
    prompt: str | None  # None when token ids were given
    prompt_token_ids: tuple[int, ...]
    seed: int
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TraceNode:
    """A drafted token."""

    token_id: int
    text: str  # what it adds to its parent's
    parent: int  # index of the parent node, -1 = root
    proposers: tuple[str, ...]  # the drafters behind it
    confidence: float | None  # the drafter's estimate that it is accepted once its parent is
    logprob: float | None  # the target's own, raw, after the node's parent; None = -inf


@dataclass(frozen=True, slots=True)
class TraceSample:
    """The target's token after the root or a node, kept or not."""

    token_id: int
    text: str
    logprob: float | None  # raw, before any processor; None = -inf


@dataclass(frozen=True, slots=True)
class TraceToken:
    """A token that the step added to the output."""

    token_id: int
    text: str  # whole characters; one that is spread over several tokens comes with its last
    origin: str  # as in Completion


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One step of one choice of one request."""

    step: int  # the engine's count; all choices of a pass have the same
    request_id: str
    choice: int  # among n
    position: int  # index in prompt and output of the first token that the step adds
    num_pending: int  # known tokens computed in it: a piece of the prompt, or the root alone
    nodes: tuple[TraceNode, ...]  # the draft
    samples: tuple[TraceSample, ...]  # after the root, then after each node; empty under a rule that draws otherwise
    path: tuple[int, ...]  # indices of the accepted nodes, up to a stop among them
    final: TraceSample | None  # None while the prompt is not through, and where the output ended within the path
    kind: str | None  # of the final token: recovered, bonus, or plain where nothing was drafted
    tokens: tuple[TraceToken, ...]  # path and final token
    finish_reason: str | None
    milliseconds: dict[str, float]  # draft, forward, verify, commit: of the pass, shared by all that are in it

    @property
    def fates(self) -> tuple[Fate, ...]:
        """What became of each node: rejected = the target sampled another token after its parent."""
        judged = {-1, *self.path}  # nodes whose children were looked at
        if self.final is None and self.path:
            judged.discard(self.path[-1])  # the output ended with it
        return tuple(
            "accepted" if index in self.path else "rejected" if node.parent in judged else "not reached"
            for index, node in enumerate(self.nodes)
        )

    def __post_init__(self) -> None:
        parents = [node.parent for node in self.nodes]
        steps_down = zip((-1, *self.path), self.path, strict=False)
        if not all(-1 <= parent < node for node, parent in enumerate(parents)):
            raise ValueError("a node comes before its parent")
        if not all(0 <= node < len(parents) and parents[node] == above for above, node in steps_down):
            raise ValueError("the path is not one of the tree")
        if len(self.samples) not in (0, 1 + len(parents)):
            raise ValueError("root and nodes have one sample each")
        if (self.final is None) != (self.kind is None) or self.kind not in (None, *_KINDS):
            raise ValueError(f"the final token's kind must be one of {', '.join(_KINDS)}")


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file's contents."""

    header: TraceHeader
    requests: dict[str, TraceRequest]
    steps: tuple[TraceStep, ...]
    truncated: bool  # the last line was cut off, and left out


_LINES = {"header": TraceHeader, "request": TraceRequest, "step": TraceStep}
_TYPES = {kind: name for name, kind in _LINES.items()}


class TraceFile:
    """A trace file that is being written. Raises ConfigError if it cannot be; what it held before is gone."""

    def __init__(self, path: str | PathLike[str]) -> None:
        try:
            # Open for as long as the engine runs, and unbuffered: what a full disk refused must not come up again
            self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"the trace file {fspath(path)!r} cannot be written ({reason}): choose another place."
            ) from error
        self._path = fspath(path)
        weakref.finalize(self, self._file.close)

    def write(self, *lines: TraceHeader | TraceRequest | TraceStep) -> None:
        """Adds lines; they are in the file when this returns. Raises OSError, with the file's name, on a full disk."""
        values = ({"type": _TYPES[type(line)], **asdict(line)} for line in lines)
        data = "".join(json.dumps(value, ensure_ascii=False, default=str) + "\n" for value in values).encode()
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            error.filename = self._path
            raise


def read_trace(path: str) -> Trace:
    """What TraceFile wrote; a last line that was cut off is left out. Raises ConfigError for any other file."""
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the trace {path}: {getattr(error, 'strerror', None) or error}.") from error
    *rows, tail = data.split(b"\n")  # whole lines end with a line feed
    lines = [_parse(row, f"{path} line {number}") for number, row in enumerate(rows, 1)]
    if not lines or not isinstance(lines[0], TraceHeader):
        raise ConfigError(f"{path} is not a trace: it must begin with a header; --trace FILE writes one.")
    requests = {line.request_id: line for line in lines if isinstance(line, TraceRequest)}
    steps = tuple(line for line in lines if isinstance(line, TraceStep))
    for step in steps:
        if step.request_id not in requests:
            raise ConfigError(f"{path} has steps of request {step.request_id!r}, but not the request: trace it anew.")
    return Trace(lines[0], requests, steps, truncated=bool(tail))


def _parse(row: bytes, where: str) -> TraceHeader | TraceRequest | TraceStep:
    try:
        value = json.loads(row)
        if value.get("type") == "header" and value.get("format") != FORMAT:
            raise ConfigError(f"{where}: this trace has format {value.get('format')!r:.20}, not {FORMAT}: trace anew.")
        return _typed(_LINES[value.pop("type")], value)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where} is not a line of a trace: --trace FILE writes such files.") from error


def _typed(kind: Any, value: Any) -> Any:
    """A JSON value as what the annotation says. Raises TypeError or ValueError if it is something else."""
    arguments = get_args(kind)
    if isinstance(kind, UnionType):
        return None if value is None else _typed(arguments[0], value)
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_typed(arguments[0], item) for item in value)
    if get_origin(kind) is dict and isinstance(value, dict):
        return {name: _typed(arguments[1], item) for name, item in value.items()}
    if kind is Any:
        return value
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind in (int, str) and type(value) is kind:
        return value
    if is_dataclass(kind) and isinstance(value, dict) and value.keys() == _hints(kind).keys():
        return kind(**{name: _typed(hint, value[name]) for name, hint in _hints(kind).items()})
    raise TypeError(f"{value!r:.60} is not {kind}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
