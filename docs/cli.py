"""Writes docs/cli.md from the command line's own options: run it after changing one (`make docs`)."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from typer.models import ArgumentInfo, OptionInfo

from paceline.cli.main import app

_METAVARS = {int: "N", float: "X", str: "TEXT", list[str]: "TEXT", bool: ""}
HEAD = """# Command line

Written by `make docs` from the commands' own help; a test keeps the two the same.

Results go to stdout; model card, statistics and progress to stderr. Exit codes: 0, 1 (a check failed, or something
unexpected), 2 (wrong input: one line says what, and what to do), 130 (Ctrl-C). `PACELINE_DEBUG=1` shows tracebacks.
`PACELINE_HOME` is where fetched models are kept, `~/.cache/paceline` by default.
"""


def render() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(_command(registered.callback) for registered in app.registered_commands)])


def _command(command: Any) -> str:
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [parameter for parameter in parameters if get_args(parameter.annotation)]  # not the context
    arguments = [_argument(p) for p in parameters if isinstance(_info(p), ArgumentInfo)]
    options = [_option(p) for p in parameters if isinstance(_info(p), OptionInfo)]
    name = command.__name__.replace("_", "-")
    usage = " ".join(["paceline", name, *(row[0] for row in arguments), *(["[OPTIONS]"] if options else [])])
    lines = [f"## paceline {name}", "", "```", usage, "```", "", inspect.cleandoc(command.__doc__), ""]
    if arguments or options:
        lines += ["| | default | |", "|---|---|---|"]
        lines += [f"| `{name}` | {default} | {_cell(text)} |" for name, default, text in (*arguments, *options)]
        lines += [""]
    return "\n".join(lines)


def _info(parameter: inspect.Parameter) -> Any:
    """What typer was told of a parameter."""
    return get_args(parameter.annotation)[1]


def _argument(parameter: inspect.Parameter) -> tuple[str, str, str]:
    info = _info(parameter)
    return info.metavar, _default(parameter), info.help


def _option(parameter: inspect.Parameter) -> tuple[str, str, str]:
    info = _info(parameter)
    named = [text for text in (info.default, *(info.param_decls or ())) if isinstance(text, str)]
    flag = named[0] if named else "--" + parameter.name.replace("_", "-")
    value = info.metavar or next(name for kind, name in _METAVARS.items() if kind in _kinds(parameter))
    return f"{flag} {value}".strip(), _default(parameter), info.help


def _kinds(parameter: inspect.Parameter) -> tuple[Any, ...]:
    """The types that a value may have: those of a union, or the one."""
    kind = get_args(parameter.annotation)[0]
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return "required"
    return "" if parameter.default is None or parameter.default is False else f"`{parameter.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    (Path(__file__).parent / "cli.md").write_text(render(), encoding="utf-8")
