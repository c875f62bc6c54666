"""How a command ends: an exit code, and one line on stderr for whatever went wrong."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import typer

from paceline.errors import ConfigError, PacelineError, PacelineWarning

USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def guarded(command: Callable[..., int]) -> Callable[..., None]:
    """A command for typer from a function that returns its exit code and may raise."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        code = exit_code(lambda: command(*args, **kwargs))
        if code:
            raise typer.Exit(code)

    return run


def exit_code(action: Callable[[], int]) -> int:
    """Runs action; errors become one line on stderr and a code. PACELINE_DEBUG=1 lets the traceback through."""
    try:
        if sys.stdout is None:
            raise ConfigError("stdout is closed: leave it open, or send it to a file or to /dev/null.")
        with _shown_warnings():
            code = action()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return 1
    except Exception as error:
        if os.environ.get("PACELINE_DEBUG") == "1":
            raise
        return _report(error)


def _report(error: Exception) -> int:
    if isinstance(error, PacelineError):
        show_error(str(error))
        return USER_ERROR
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        what = f"{error.strerror or error}{where}"
        if error.errno == errno.ENOSPC:  # in a download it is a DownloadError
            _discard_stdout()
            what = f"could not write the output: {what}; free some, or send it elsewhere."
        show_error(what)
        return USER_ERROR
    show_error(f"{type(error).__name__}: {error} (unexpected: set PACELINE_DEBUG=1 for the traceback)")
    return 1


@contextlib.contextmanager
def _shown_warnings() -> Iterator[None]:
    """Our own warnings become one line on stderr, without the place in our code; others look as always."""
    with warnings.catch_warnings():
        as_always = warnings.showwarning

        def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, PacelineWarning):
                _show("warning:", "yellow", str(message))
            else:
                as_always(message, category, *place, **more)

        warnings.showwarning = show
        yield


def show_error(message: str) -> None:
    """`error: message` on stderr, in one line."""
    _show("error:", "red", message)


def _show(label: str, colour: str, message: str) -> None:
    typer.echo(typer.style(label, fg=colour, bold=True) + " " + " ".join(message.split()), err=True)


def _discard_stdout() -> None:
    """Nobody takes the rest: Python's own flush at exit must not fail a second time."""
    with contextlib.suppress(OSError, ValueError):  # stdout may be an object without a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
