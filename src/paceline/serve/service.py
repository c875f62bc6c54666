"""What the routes share: the engine, the model's tokenizer, the server's settings and its metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from paceline.config import at_least
from paceline.engine.async_engine import AsyncEngine
from paceline.engine.engine import Engine
from paceline.errors import ConfigError
from paceline.serve.errors import ApiError
from paceline.serve.metrics import Metrics
from paceline.serve.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the server behaves towards its clients."""

    model_names: tuple[str, ...]  # what requests may call the model; the first is what answers call it
    api_key: str | None = None  # None = everybody may use it
    max_waiting: int = 256  # requests that wait for their first step; beyond them clients are told to come back
    max_body_bytes: int = 4 << 20  # larger requests are refused
    body_seconds: float = 60.0  # for a request to arrive
    write_seconds: float = 60.0  # for a client to take what it is sent, before its request is cancelled
    request_seconds: float | None = None  # a request that takes longer ends with what it has
    drain_seconds: float = 30.0  # for running requests to finish once the server is told to stop
    log_requests: bool = True  # a line for each

    def __post_init__(self) -> None:
        at_least("max_waiting", self.max_waiting, 1, example=256)
        if self.request_seconds is not None and not 0 < self.request_seconds < 1e9:
            raise ConfigError(
                f"request_seconds must be a number of seconds above 0, or None; got {self.request_seconds!r}: try 60."
            )
        for name in ("drain_seconds", "body_seconds", "write_seconds"):
            value = getattr(self, name)
            if not 0 <= value < 1e9:
                raise ConfigError(f"{name} must be a number of seconds, 0 or more; got {value!r}: try 60.")


class Service:
    """The parts behind the routes."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.metrics = Metrics()
        self.engine = AsyncEngine(engine, max_waiting=settings.max_waiting, observer=self.metrics.observe)
        self.metrics.watch(self.engine)
        self.settings = settings
        self.tokenizer = engine.tokenizer
        self.vocabulary = Vocabulary(engine.tokenizer)
        self.vocab_size = engine.runner.vocab_size
        self.max_model_len = engine.runner.max_model_len
        self.speculation = _offer(engine)
        self.started_at = int(time.time())

    @property
    def model(self) -> str:
        """The name of the model in answers."""
        return self.settings.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Raises ApiError unless the model of that name is the one that is served; None is any."""
        if name is not None and name not in self.settings.model_names:
            raise ApiError(
                404,
                f"model: {name!r:.100} is not served here: use {' or '.join(self.settings.model_names)}.",
                param="model",
                code="model_not_found",
            )


def _offer(engine: Engine) -> dict[str, Any]:
    """What a request may choose in `speculative`, and what it then gets."""
    return {
        "methods": ["auto", *(() if engine.drafter is None else engine.drafter.members), "none"],
        "num_speculative_tokens": engine.scheduler.max_draft_tokens,
        "lossless": engine.verifier.lossless,
    }


def service_of(request: Request) -> Service:
    """The service of the app that got the request: a dependency of the routes."""
    return request.app.state.service
