"""Somebody else's drafter: whatever its code raises is one error that names it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.draft.wrapper import DrafterWrapper
from paceline.errors import PlugInError
from paceline.interfaces import Controller, Drafter
from paceline.types import Draft, Observation, RequestView


class PlugInDrafter(DrafterWrapper):
    """Passes everything on to a plug-in's drafter; what that declares is read once.

    method: its name in the settings. Raises PlugInError, here and later, for any exception of the plug-in's code, an
    attempt to exit included; the exception is the error's cause.
    """

    def __init__(self, drafter: Drafter, *, method: str) -> None:
        self._method = method
        with self._blamed("in what it declares"):
            super().__init__(drafter)

    @property
    def members(self) -> tuple[str, ...]:
        with self._blamed("in what it declares"):
            return tuple(super().members)

    def propose(self, views: Sequence[RequestView], budgets: Sequence[int]) -> list[Draft | None]:
        with self._blamed("in propose"):
            return super().propose(views, budgets)

    def consult(self, controller: Controller) -> None:
        with self._blamed("in consult"):
            super().consult(controller)

    def observe(self, step: Observation) -> None:
        with self._blamed("in observe"):
            super().observe(step)

    def release(self, request_id: str) -> None:
        with self._blamed("in release"):
            super().release(request_id)

    def close(self) -> None:
        with self._blamed("in close"):
            super().close()

    @contextmanager
    def _blamed(self, where: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            raise PlugInError(
                f"plug-in {self._method!r} failed {where} ({reason_of(error)}): mend it, or draft by another method; "
                "PACELINE_DEBUG=1 shows the traceback."
            ) from error


def reason_of(error: BaseException) -> str:
    """The exception's type and words, in one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
