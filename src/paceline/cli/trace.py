"""`paceline trace`: a trace file, readable: the text by origin, and each step's tree with the fates of its nodes."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.output import ORIGIN_STYLES, note, write_text
from paceline.engine.trace import TraceRequest, TraceStep, read_trace
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MARKS = {"accepted": "+", "recovered": "!", "bonus": "*", "plain": "="}  # for eyes and terminals without colour
_FATES = {
    "accepted": (MARKS["accepted"], ORIGIN_STYLES["accepted"]),
    "rejected": ("x", ""),
    "not reached": (".", "dim"),
}
_PROMPT_WIDTH = 200


def trace(
    file: Annotated[str, typer.Argument(help="What --trace wrote.", metavar="FILE")],
    request: Annotated[str | None, typer.Option(help="Only this request, by its id.", metavar="ID")] = None,
    steps: Annotated[
        str | None, typer.Option(help="Only these steps, such as 7 or 3-12 or 40-.", metavar="A-B")
    ] = None,
) -> int:
    """Show a trace: the text in the colours of its tokens' origins, then each step and its draft.

    A line of a tree is a drafted token: + accepted, x rejected (the target sampled something else), . never reached;
    then the target's probability of it, before sampling parameters; in brackets the drafter's confidence; the drafters,
    where there are several; and -> what the target would have sampled next, where no node holds it. The final token is
    marked ! recovered, * bonus or = plain.
    """
    from rich.console import Console

    first, last = (1, math.inf) if steps is None else _span(steps)
    found = read_trace(file)
    chosen = [step for step in found.steps if first <= step.step <= last and request in (None, step.request_id)]
    if request is not None and request not in found.requests:
        raise ConfigError(f"{file} has no request {request!r:.40}: it has {_listed(list(found.requests))}.")
    if not chosen:
        end = max((step.step for step in found.steps), default=0)
        raise ConfigError(f"{file} has no such steps: they end at {end}; choose others, or trace a longer run.")
    console = Console(highlight=False, soft_wrap=True)
    header = found.header
    _show(console, [_text(f"{header.model}; paceline {header.version}", "dim"), _legend(console)])
    order = {request_id: place for place, request_id in enumerate(found.requests)}
    by_choice = sorted(chosen, key=lambda step: (order[step.request_id], step.choice))
    for (request_id, choice), own in itertools.groupby(by_choice, key=lambda step: (step.request_id, step.choice)):
        _show(console, _choice(console, found.requests[request_id], choice, list(own)))
    if found.truncated:
        note("the last line was cut off, as the run was stopped in the midst of it, and is left out")
    return 0


def _span(text: str) -> tuple[float, float]:
    """First and last step of "7", "3-12" or "40-"."""
    match = re.fullmatch(r"(\d{1,9})(-(\d{0,9}))?", text, re.ASCII)
    span = (0, 0) if match is None else (int(match[1]), int(match[3] or 10**9) if match[2] else int(match[1]))
    if not 1 <= span[0] <= span[1]:
        raise ConfigError(f"--steps must be a step or a range such as 7, 3-12 or 40-, from 1; got {text!r:.40}.")
    return span


def _listed(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _choice(console: Console, request: TraceRequest, choice: int, steps: list[TraceStep]) -> Iterator[Text]:
    """One choice of a request: its heading, its text, its steps."""
    name = f"request {request.request_id}" + (f", choice {choice}" if request.params.get("n", 1) != 1 else "")
    tokens = sum(len(step.tokens) for step in steps)
    drafted = sum(len(step.nodes) for step in steps)
    accepted = sum(len(step.tokens) - 1 for step in steps if step.tokens)  # as metrics count: not a step's last token
    counts = (
        f"{_count(tokens, 'token')} in {_count(len(steps), 'step')}, {accepted} of {_count(drafted, 'node')} accepted"
    )
    yield _text(f"\n{name}: {counts}, seed {request.seed}", "bold")
    yield _text(_prompt(request), "dim")
    yield _flow(console, steps)
    one_line = False  # the step above takes no more
    for step in steps:
        if step.nodes or not one_line:
            yield _text("")
        yield from _step(step)
        one_line = not step.nodes


def _prompt(request: TraceRequest) -> str:
    """The end of the prompt, in one line."""
    if request.prompt is None:
        return _count(len(request.prompt_token_ids), "token id")
    words = " ".join(request.prompt.split())
    return words if len(words) <= _PROMPT_WIDTH else "... " + words[-_PROMPT_WIDTH:].split(" ", 1)[-1]


def _flow(console: Console, steps: list[TraceStep]) -> Text:
    """The text that the steps added; without colour, {+...+} and the like around what was drafted and what ended it."""
    from rich.text import Text

    tokens = [token for step in steps for token in step.tokens]
    flow = Text()
    for origin, run in itertools.groupby(tokens, key=lambda token: token.origin):
        words = _visible("".join(token.text for token in run))
        mark = MARKS.get(origin, "")
        if _colourless(console) and origin in ORIGIN_STYLES:
            words = f"{{{mark}{words}{mark}}}"
        flow.append(words, style=ORIGIN_STYLES.get(origin, ""))
    return flow


def _step(step: TraceStep) -> Iterator[Text]:
    """A heading, and the tree below it; one line where nothing was drafted."""
    end = f"; ends: {step.finish_reason}" if step.finish_reason is not None else ""
    times = f"; ms: {', '.join(f'{stage} {value:.2f}' for stage, value in step.milliseconds.items())}{end}"
    if not step.tokens:
        yield _text(f"step {step.step}: {_count(step.num_pending, 'token')} of the prompt computed{times}", "dim")
    elif not step.nodes:
        yield _text(f"step {step.step}, position {step.position}: ", "dim").append(_final(step)).append(times, "dim")
    else:
        names = dict.fromkeys(name for node in step.nodes for name in node.proposers)
        counts = f"{len(step.path)} of {_count(len(step.nodes), 'node')} by {' and '.join(names)} accepted"
        yield _text(f"step {step.step}, position {step.position}: {counts}{times}", "dim")
        yield from _tree(step)


def _tree(step: TraceStep) -> Iterator[Text]:
    """A line a node, and one for the final token where it stands; only branches are indented, so chains stay narrow."""
    end = len(step.nodes)  # the final token's place among the nodes
    last = step.path[-1] if step.path else -1
    parents = [*(node.parent for node in step.nodes), *([last] if step.final is not None else [])]
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    waiting: list[tuple[int, str, str]] = []  # node, what its line begins with, and the lines below it
    parent, below = -1, ""
    while True:
        siblings = children.get(parent, [])
        for node in reversed(siblings):
            is_last = node == siblings[-1]
            lead, rest = ("", "") if len(siblings) == 1 else ("└ ", "  ") if is_last else ("├ ", "│ ")
            waiting.append((node, below + lead, below + rest))
        if not waiting:
            return
        parent, lead, below = waiting.pop()
        if parent == end:
            yield _text(lead).append(_final(step))
        else:
            held = {step.nodes[child].token_id for child in children.get(parent, []) if child != end}
            yield _text(lead).append(_node(step, parent, held))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _final(step: TraceStep) -> Text:
    assert step.final is not None
    assert step.kind is not None
    marked = f"{MARKS[step.kind]} {_quoted(step.final.text)}"
    return _text(marked, ORIGIN_STYLES.get(step.kind, "")).append(f" {_probability(step.final.logprob)} {step.kind}")


def _node(step: TraceStep, index: int, held: set[int]) -> Text:
    """held: the token ids of the node's children."""
    node = step.nodes[index]
    mark, style = _FATES[step.fates[index]]
    line = _text(f"{mark} {_quoted(node.text)}", style).append(f" {_probability(node.logprob)}")
    if node.confidence is not None:
        line.append(f" [{node.confidence:.2f}]")
    if len({node.proposers for node in step.nodes}) > 1:
        line.append(_visible(f" {'+'.join(node.proposers)}"), "dim")
    if step.samples and index not in step.path and step.samples[index + 1].token_id not in held:
        line.append(f" -> {_quoted(step.samples[index + 1].text)}", "dim")
    return line


def _legend(console: Console) -> Text:
    from rich.text import Text

    legend = Text()
    for origin, style in ORIGIN_STYLES.items():
        mark = MARKS[origin]
        legend.append(f"{{{mark}{origin}{mark}}}" if _colourless(console) else origin, style).append(", ")
    return legend.append("the rest without a draft (=); steps: x rejected, . not reached; probability [confidence]")


def _show(console: Console, lines: list[Text] | Iterator[Text]) -> None:
    for line in lines:
        with console.capture() as captured:
            console.print(line)
        write_text(captured.get())


def _text(words: str, style: str = "") -> Text:
    from rich.text import Text

    return Text().append(_visible(words), style)


def _colourless(console: Console) -> bool:
    return console.no_color or console.color_system is None


def _probability(logprob: float | None) -> str:
    return f"{0.0 if logprob is None else math.exp(min(logprob, 0.0)):.2f}"


def _quoted(text: str) -> str:
    return json.dumps(_visible(text), ensure_ascii=False)


def _visible(text: str) -> str:
    """Control characters, which could steer the terminal, as escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
