"""Runs the app under uvicorn until a signal: streams finish, or end with a proper last event, before it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from paceline.errors import ConfigError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE_SECONDS = 5  # for what is over to reach the clients
_FORCED_SECONDS = 2.0  # the same after a second signal

_log = logging.getLogger("paceline.serve")


class Server(uvicorn.Server):
    """A uvicorn server that stops the engine first: what runs has settings.drain_seconds to finish.

    A second signal ends what runs at once.
    """

    def __init__(self, app: FastAPI) -> None:
        self._service = app.state.service
        self._hurried = False
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,  # the app logs each request itself, with its tokens
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Each running request ends with an output; until then new ones, and /health, are told 503."""
        engine, seconds = self._service.engine, self._service.settings.drain_seconds
        stats = engine.stats()
        if left := stats.num_running + stats.num_waiting:
            _log.info("stopping: what runs (%d) has up to %g s to finish; a second signal ends it now", left, seconds)
        hurried = asyncio.ensure_future(self._close_if_hurried())
        await engine.close(seconds)
        await super().shutdown(sockets)
        hurried.cancel()

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
        self._hurried = self.should_exit
        self.should_exit = True

    async def _close_if_hurried(self) -> None:
        while not self._hurried:
            await asyncio.sleep(0.1)  # a signal handler may not wake the loop by itself
        await self._service.engine.close(drain_seconds=0.0)
        await asyncio.sleep(_FORCED_SECONDS)
        self.force_exit = True  # who has not read its last event by now is cut off


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
