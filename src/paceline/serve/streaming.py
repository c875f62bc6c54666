"""Server-sent events: sent as the client takes them, and given up when it is gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.engine.request_stream import RequestStream
from paceline.serve.disconnect import ClientGone, while_connected
from paceline.serve.errors import as_api_error
from paceline.serve.generation import close
from paceline.serve.record import record_of

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no proxy is to hold back or keep events


class EventStream(Response):
    """A response of JSON events, which ends with `[DONE]`; an error in mid-stream is its last event but one.

    streams: where the events come from; they are closed in any case, the events never having been asked for included.
    write_seconds: how long the client may take to read what is sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[dict[str, Any], None], *, streams: Sequence[RequestStream], write_seconds: float
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._streams = streams
        self._write_seconds = write_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await while_connected(receive, self._send(send))
        except ClientGone:
            record_of(scope).left = True
        finally:
            await close(self._streams)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for text in _encoded(self._events):
                async with asyncio.timeout(self._write_seconds):
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        except TimeoutError:
            return  # the client does not read: the server closes the connection
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _encoded(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"
    except Exception as error:
        yield f"data: {json.dumps(as_api_error(error).body)}\n\n"
    yield "data: [DONE]\n\n"
