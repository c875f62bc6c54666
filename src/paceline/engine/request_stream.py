"""One request's deltas on their way to its reader, and the times at which they came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Self

from paceline.engine.request import Request
from paceline.engine.stats import FinishedRequest
from paceline.types import Delta, RequestOutput


class RequestStream(AsyncIterator[Delta]):
    """Yields what is new of a request, until the delta that carries its output. For one reader, on the loop's thread.

    A slow reader gets what came in the meantime as one delta a choice, so nothing piles up beyond the request's own
    output. `aclose`, and cancelling the reader while it waits, aborts the request. Raises EngineStepError if a step
    with the request failed.
    """

    def __init__(self, request: Request, *, arrived_at: float, give_up: Callable[[str], None]) -> None:
        self.request_id = request.id
        self.request = request
        self._give_up = give_up
        self._news = asyncio.Event()
        self._unread: dict[int, list[Delta]] = {}  # by choice; the one that was added to last is last
        self._ended = False
        self._closed = False
        self._error: Exception | None = None
        self._arrived_at = arrived_at
        self._first_token_at: float | None = None
        self._last_token_at: dict[int, float] = {}  # by choice
        self.num_tokens = 0
        self._inter_token_seconds: list[tuple[int, float]] = []

    @property
    def unscheduled(self) -> bool:
        """It waits for its first step."""
        return not self._ended and self.request.sequences[0].scheduled_at is None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not (self._unread or self._ended or self._closed):
            self._news.clear()
            try:
                await self._news.wait()
            except asyncio.CancelledError:
                await self.aclose()
                raise
        if self._unread:
            choice = next(iter(self._unread))
            return Delta.joined(self._unread.pop(choice))
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Aborts the request if it is not over. What was not read is dropped."""
        if not self._closed and not self._ended:
            self._give_up(self.request_id)
        self._closed = True
        self._unread.clear()
        self._error = None
        self._news.set()  # for whoever else is still reading

    def put(self, delta: Delta, *, at: float) -> None:
        """One more delta, of a step that ended at this time.perf_counter()."""
        self._note_times(delta, at)
        if not self._closed:
            deltas = self._unread[delta.index] = self._unread.pop(delta.index, [])
            deltas.append(delta)
            self._news.set()

    def end(self, *, error: Exception | None = None) -> None:
        """No more comes, or only this error."""
        self._ended = True
        self._error = None if self._closed else error
        self._news.set()

    def record(self, output: RequestOutput | None, *, at: float) -> FinishedRequest:
        """The request's times, once it has ended."""
        scheduled_at = self.request.sequences[0].scheduled_at
        return FinishedRequest(
            output=output,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_generation_tokens=self.num_tokens,
            queue_seconds=None if scheduled_at is None else max(0.0, scheduled_at - self._arrived_at),
            first_token_seconds=None if self._first_token_at is None else self._first_token_at - self._arrived_at,
            seconds=at - self._arrived_at,
            inter_token_seconds=tuple(self._inter_token_seconds),
        )

    def _note_times(self, delta: Delta, at: float) -> None:
        count = len(delta.token_ids)
        if not count:
            return
        self.num_tokens += count
        if self._first_token_at is None:
            self._first_token_at = at
        before = self._last_token_at.get(delta.index)
        self._last_token_at[delta.index] = at
        if before is not None:
            self._inter_token_seconds.append((count, (at - before) / count))
