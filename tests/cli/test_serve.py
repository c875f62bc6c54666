"""`paceline serve`: it says where it listens, refuses in one line, and ends streams properly when it stops."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from typer.testing import CliRunner

from paceline.cli.main import app


@contextmanager
def command(*arguments: object, **environment: str) -> Iterator[tuple[subprocess.Popen, str, list[str]]]:
    """The running command, its URL, and what it said on stderr so far."""
    words = [sys.executable, "-m", "paceline", "serve", *map(str, arguments), "--port", "0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process:
        try:
            said: list[str] = []
            for line in process.stderr:
                said.append(line)
                if (found := re.search(r"at (http://\S+)/v1$", line)) is not None:
                    break
            assert found is not None, "".join(said)
            yield process, found[1], said
        finally:
            process.kill()


def test_sigterm_ends_streams_and_leaves_with_0(tiny_llama):
    with command(tiny_llama, "--drain-timeout", "0", "--max-model-len", "500") as (process, url, said):
        assert not any("warning" in line for line in said)
        body = {"prompt": "a", "stream": True, "max_tokens": 400, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            process.send_signal(signal.SIGTERM)
            *_, last, done = lines
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] in ("abort", "length")
        rest = process.stderr.read()
        assert process.wait(60) == 0
        assert re.search(r"POST /v1/completions 200 1\+\d+ tokens", rest)
        assert rest.endswith("stopped\n")


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_sigterm_lets_streams_finish(tiny_llama, path):
    body: dict = {"stream": True, "max_tokens": 64, "ignore_eos": True}
    body |= {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}

    def follow(url: str, begun: threading.Barrier) -> list[str]:
        with httpx.stream("POST", f"{url}/v1/{path}", json=body, timeout=60) as response:
            lines = (line for line in response.iter_lines() if line)
            first = next(lines)
            begun.wait(60)
            return [first, *lines]

    with command(tiny_llama, "--no-log-requests") as (process, url, _), ThreadPoolExecutor(4) as pool:
        begun = threading.Barrier(5, action=lambda: process.send_signal(signal.SIGTERM))
        streams = [pool.submit(follow, url, begun) for _ in range(4)]
        begun.wait(60)
        for stream in streams:
            *_, last, done = stream.result(60)
            assert done == "data: [DONE]"
            assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(60) == 0


def test_killed_and_started_again(tiny_llama, tmp_path):
    table = tmp_path / "table.npz"
    speculation = json.dumps({"method": "recycle", "table": str(table)})
    options = (tiny_llama, "--speculation", speculation, "--no-log-requests", "--max-model-len", "500")
    body = {"prompt": "ab ab ab", "max_tokens": 24, "temperature": 0}

    def answer(url: str) -> str:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]

    with command(*options) as (process, url, _):
        expected = answer(url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    saved = table.read_bytes()
    with command(*options) as (process, url, _):
        endless = body | {"stream": True, "max_tokens": 400, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=endless, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.kill()
            with pytest.raises(httpx.TransportError):
                list(lines)
    assert table.read_bytes() == saved
    with command(*options) as (process, url, _):
        assert answer(url) == expected
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["table.npz"]


def test_a_key_from_the_environment_and_an_open_address(tiny_llama):
    options = ("--host", "0.0.0.0", "--served-model-name", "tiny", "--no-log-requests")
    with command(tiny_llama, *options, PACELINE_API_KEY="secret") as (_, url, said):
        assert not any("warning" in line for line in said)
        url = url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/v1/models").status_code == 401
        [model] = httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer secret"}).json()["data"]
        assert model["id"] == "tiny"
    with command(tiny_llama, *options) as (_, _, said):
        assert any("without --api-key, everybody who reaches 0.0.0.0 can use this server" in line for line in said)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "203.0.113.77"], "cannot listen on 203.0.113.77"),
        (["--host", "no such host"], "is no address"),
        (["--api-key", "\n"], "--api-key must be"),
        (["--max-body-size", "lots"], "--max-body-size must be"),
        (["--max-waiting", "0"], "max_waiting must be"),
        (["--request-timeout", "0"], "request_seconds must be a number of seconds above 0"),
        (["--request-timeout", "nan"], "--request-timeout must be a number of seconds"),
        (["--drain-timeout", "nan"], "--drain-timeout must be"),
        (["--speculation", "magic"], "method must be one of"),
    ],
)
def test_refusals(options, message):
    result = CliRunner().invoke(app, ["serve", "no-such-model", *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "no-such-model", "--port", str(port)])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"port {port} is in use" in result.stderr


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "prometheus_client"])
def test_without_the_extra(monkeypatch, package):
    for name in [n for n in sys.modules if n.startswith("paceline.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    result = CliRunner().invoke(app, ["serve", "no-such-model"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "pip install 'paceline[serve]'" in result.stderr
