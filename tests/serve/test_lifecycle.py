"""Clients that leave or do not read, deadlines, a full queue, steps that fail, and a server that is told to stop."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from live_server import Live, serving, toy
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.engine import Engine
from paceline.testing import ToyModel

ENDLESS: dict[str, Any] = {"prompt": "ab", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


class Gate:
    """Holds the passes of an engine until they are let through."""

    def __init__(self, engine: Engine) -> None:
        self._forward = engine.runner.forward
        self._permits = threading.Semaphore(0)
        self.open = threading.Event()
        self.reached = threading.Event()  # a pass waits, or has waited
        self.idle = threading.Event()  # nothing runs any more
        engine.runner.forward = self.forward  # type: ignore[method-assign]
        abort = engine.abort

        def aborting(request_id: str, **options: Any) -> Any:
            deltas = abort(request_id, **options)
            if not engine.has_unfinished:
                self.idle.set()
            return deltas

        engine.abort = aborting  # type: ignore[method-assign]

    def forward(self, *arguments: Any) -> Any:
        self.reached.set()
        if not self.open.is_set():
            self._permits.acquire(timeout=60)
        return self._forward(*arguments)

    def let(self, passes: int) -> None:
        for _ in range(passes):
            self._permits.release()

    def let_until_idle(self) -> None:
        """One pass after the other, until the last request was cancelled."""
        for attempt in range(100):  # waiting ever longer: a busy machine learns late that a client is gone
            if self.idle.wait(0.02 * attempt):
                return
            self.let(1)

    def let_all(self) -> None:
        self.open.set()
        self.let(1)


@pytest.fixture
def gated() -> Iterator[tuple[Live, Gate]]:
    engine = toy()
    gate = Gate(engine)
    with serving(engine) as live:
        yield live, gate
        gate.let_all()


def events(response: httpx.Response) -> Iterator[dict[str, Any] | str]:
    for line in response.iter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def test_a_client_that_leaves_in_mid_stream_cancels(gated):
    live, gate = gated
    gate.let(3)
    with httpx.stream("POST", live.url + "/v1/completions", json=ENDLESS | {"stream": True}, timeout=60) as response:
        assert next(events(response))["choices"][0]["text"]
    gate.let_until_idle()
    assert gate.idle.is_set()


def test_a_client_that_leaves_before_its_answer_cancels(gated):
    live, gate = gated
    body = json.dumps(ENDLESS).encode()
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        assert gate.reached.wait(60)
    gate.let_until_idle()
    assert gate.idle.is_set()


def test_a_client_that_does_not_read_is_given_up():
    engine = toy()
    gate = Gate(engine)
    body = json.dumps({"prompt": ["ab"] * 200, "stream": True, "logprobs": 100, "max_tokens": 100}).encode()
    with serving(engine, write_seconds=0.2) as live, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", live.port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        gate.let_all()
        assert gate.idle.wait(60)


class Late(ToyModel):
    """Its third pass ends after the deadline of the only request."""

    engine: Engine

    def forward(self, batch: Any, sampling: Any = None) -> Any:
        output = super().forward(batch, sampling)
        if self.num_passes == 3:
            [request] = self.engine.requests.values()
            assert request.deadline > time.perf_counter()
            request.deadline = time.perf_counter()
        return output


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request_with_what_it_has(stream):
    runner = Late(vocab_size=102, num_blocks=64, block_size=4, max_model_len=256)
    runner.engine = toy(runner=runner)
    with serving(runner.engine, request_seconds=3600.0) as live:
        response = live.post("/v1/completions", json=ENDLESS | {"stream": stream})
        choices = [event["choices"][0] for event in events(response) if event != "[DONE]"] if stream else []
        last = choices[-1] if stream else response.json()["choices"][0]
    assert "".join(choice["text"] for choice in [*choices, last])
    assert (last["finish_reason"], last["stop_reason"]) == ("abort", "deadline")


def test_a_full_queue_says_when_to_come_back():
    engine = toy()
    gate = Gate(engine)
    with serving(engine, max_waiting=1) as live:
        body = {"prompt": ["ab", "cd", "ef", "ab"], "max_tokens": 2}
        response = live.post("/v1/completions", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
        assert int(response.headers["retry-after"]) >= 1
        gate.let_all()
        assert gate.idle.wait(60)  # none of the four runs on
        with pytest.raises(openai.RateLimitError):
            live.client().completions.create(model="toy", **body)


class Failing(ToyModel):
    """Raises in its third pass."""

    def forward(self, batch: Any, sampling: Any = None) -> Any:
        output = super().forward(batch, sampling)
        if self.num_passes == 3:
            raise RuntimeError("a broken pass")
        return output


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails_is_a_500_and_the_next_request_runs(stream):
    engine = toy(runner=Failing(vocab_size=102, num_blocks=64, block_size=4, max_model_len=128))
    with serving(engine) as live:
        response = live.post("/v1/completions", json=ENDLESS | {"stream": stream})
        if stream:
            *_, error, done = events(response)
            assert done == "[DONE]"
        else:
            assert response.status_code == 500
            error = response.json()
        assert error["error"]["type"] == "server_error"
        assert live.post("/v1/completions", json=ENDLESS).status_code == 200


@contextmanager
def begun(live: Live) -> Iterator[Iterator[Any]]:
    """The events of an endless completion after the first one."""
    with httpx.stream("POST", live.url + "/v1/completions", json=ENDLESS | {"stream": True}, timeout=60) as response:
        stream = events(response)
        assert next(stream)["choices"][0]["text"]
        yield stream


@pytest.mark.parametrize("drain", [0.0, 60.0])
def test_a_server_that_stops_ends_its_streams(drain, monkeypatch):
    closing = threading.Event()
    close = AsyncEngine.close

    async def noted(engine: AsyncEngine, drain_seconds: float = 30.0) -> None:
        closed = asyncio.ensure_future(close(engine, drain_seconds))
        await asyncio.sleep(0)  # until it waits for the engine's thread
        closing.set()
        await closed

    monkeypatch.setattr(AsyncEngine, "close", noted)
    engine = toy()
    gate = Gate(engine)
    with serving(engine, drain_seconds=drain) as live:
        gate.let(3)
        with begun(live) as stream:
            live.server.should_exit = True
            assert closing.wait(60)
            gate.let_all()
            *_, last, done = stream
    assert done == "[DONE]"
    assert last["choices"][0]["finish_reason"] == ("length" if drain else "abort")
    assert not live.thread.is_alive()


def test_a_server_that_drains_says_so_and_a_second_signal_ends_it(monkeypatch, caplog):
    hurried = threading.Event()
    close = AsyncEngine.close

    async def noted(engine: AsyncEngine, drain_seconds: float = 30.0) -> None:
        closed = asyncio.ensure_future(close(engine, drain_seconds))
        await asyncio.sleep(0)
        if drain_seconds == 0.0:
            hurried.set()
        await closed

    monkeypatch.setattr(AsyncEngine, "close", noted)
    caplog.set_level(logging.INFO)
    engine = toy()
    gate = Gate(engine)
    with serving(engine, drain_seconds=600.0) as live:
        gate.let(3)
        with begun(live) as stream:
            live.server.handle_exit(signal.SIGTERM, None)
            deadline = time.monotonic() + 60
            while live.get("/health").status_code != 503 and time.monotonic() < deadline:
                time.sleep(0.05)
            refused = live.post("/v1/completions", json=ENDLESS)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "engine_closed"
            live.server.handle_exit(signal.SIGTERM, None)
            assert hurried.wait(60)
            gate.let_all()
            *_, last, done = stream
    assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
    assert not live.thread.is_alive()
    assert [record.message for record in caplog.records if "has up to 600 s to finish" in record.message]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
