"""Runs the app under uvicorn until a signal: streams finish, or end with a proper last event, before it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from paceline.errors import ConfigError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE_SECONDS = 5.0  # for what is over to reach the clients, on top of the time to drain


class Server(uvicorn.Server):
    """A uvicorn server that stops the engine first: what runs has settings.drain_seconds to finish.

    A second signal ends it at once.
    """

    def __init__(self, app: FastAPI) -> None:
        self._service = app.state.service
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,  # the app logs each request itself, with its tokens
            timeout_graceful_shutdown=int(self._service.settings.drain_seconds + _GRACE_SECONDS),
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more requests; each running one ends with an output before its connection is closed."""
        drained = asyncio.ensure_future(self._service.engine.close(self._service.settings.drain_seconds))
        forced = asyncio.ensure_future(self._close_if_forced())
        await super().shutdown(sockets)
        await drained
        forced.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals end the server and no more: uvicorn's own would raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: object) -> None:
        """The first signal lets requests finish, the second does not."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def _close_if_forced(self) -> None:
        while not self.force_exit:
            await asyncio.sleep(0.1)  # a signal handler may not wake the loop by itself
        await self._service.engine.close(drain_seconds=0.0)


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Raises ConfigError where that cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host!r:.100} is no address of this machine ({error}): try 127.0.0.1.") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} is in use: stop what listens there, or take another --port.") from error
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror}): try --host 127.0.0.1 --port 8000."
        ) from error
    return bound


def is_loopback(host: str) -> bool:
    """Only programs on this machine can reach the address."""
    return host == "localhost" or host == "::1" or host.startswith("127.")
