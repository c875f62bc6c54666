"""A server on a free port of this machine, in a thread, for as long as a test needs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from paceline.engine.engine import Engine
from paceline.engine.traced import TracedEngine
from paceline.serve.app import create_app
from paceline.serve.server import Server, listen
from paceline.serve.service import ServerSettings
from paceline.testing import CharTokenizer, ToyModel
from toy_engine import make_engine

MODEL = "toy"
TOKENIZER = CharTokenizer()


def toy(*, runner=None, tokenizer=TOKENIZER, **options):
    """An engine of printable characters, whose texts repeat enough for its drafter to be right at times."""
    runner = runner or ToyModel(
        vocab_size=TOKENIZER.vocab_size,
        seed=3,
        order=1,
        num_blocks=1024,
        block_size=4,
        max_model_len=1024,
        peakedness=3.0,
    )
    return make_engine(tokenizer=tokenizer, runner=runner, kind=TracedEngine, **options)


@dataclass(frozen=True)
class Live:
    """A running server and its parts."""

    url: str
    server: Server
    engine: Engine
    thread: threading.Thread

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, **options: Any) -> openai.OpenAI:
        """The real client, which never tries again by itself."""
        return openai.OpenAI(base_url=f"{self.url}/v1", max_retries=0, **{"api_key": "any", "timeout": 60, **options})

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)


@contextmanager
def serving(engine: Engine, *, spans: Any = None, **settings: Any) -> Iterator[Live]:
    """Serves until the block is left; then nothing runs, and the engine's cache is whole."""
    options = {"model_names": (MODEL,), "log_requests": False, "drain_seconds": 0.0, **settings}
    server = Server(create_app(engine, ServerSettings(**options), spans=spans))
    with listen("127.0.0.1", 0) as socket:
        socket.listen(128)  # clients may connect before the server is up
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
        thread.start()
        try:
            yield Live(f"http://127.0.0.1:{socket.getsockname()[1]}", server, engine, thread)
        finally:
            server.should_exit = True
            thread.join(60)
    assert not thread.is_alive()
    assert not engine.has_unfinished
    engine.check_integrity()
