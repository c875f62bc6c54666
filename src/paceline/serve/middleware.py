"""Around every request: a record and its log line, the key, and limits on the body. Plain ASGI, so streams stream."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.errors import ApiError
from paceline.serve.record import KEY, RequestRecord

OPEN_PATHS = frozenset({"/", "/health"})  # for everybody: they tell nothing, and run nothing

_log = logging.getLogger("paceline.serve")


class RecordMiddleware:
    """Notes each request, and reports it when it is over, in whichever way."""

    def __init__(self, app: ASGIApp, *, report: Callable[[Scope, RequestRecord], None], log: bool) -> None:
        self._app = app
        self._report = report
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = scope[KEY] = RequestRecord(scope["method"], scope["path"])

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            record.status = 500  # which stands outside of this: the server's last resort
            raise
        finally:
            self._report(scope, record)
            if self._log:
                _log.info("%s", record.line())


class KeyMiddleware:
    """Lets in those who send the key as a bearer token; compared in constant time."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                reason = "this API key is wrong" if given else "an API key is needed"
                error = ApiError(
                    401,
                    f"{reason}: send the server's as Authorization: Bearer KEY.",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                return await error.response()(scope, receive, send)
        await self._app(scope, receive, send)


class BodyMiddleware:
    """Refuses a body that is too large or too slow; what is too large is not even read."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        try:
            if declared.isdigit() and int(declared[:20]) > self._max_bytes:
                raise self._too_large()
            body = await self._read(receive)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        if body is None:
            return None  # the client is gone

        async def replayed() -> Message:
            nonlocal body
            if body is not None:
                whole, body = body, None
                return {"type": "http.request", "body": whole, "more_body": False}
            return await receive()

        await self._app(scope, replayed, send)

    async def _read(self, receive: Receive) -> bytes | None:
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > self._max_bytes:
                        raise self._too_large()
                    if not message.get("more_body"):
                        return b"".join(chunks)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._seconds:g} seconds: send it again.") from None

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body may have {self._max_bytes} bytes: shorten it, or raise --max-body-size.",
            code="body_too_large",
        )
