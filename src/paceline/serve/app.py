"""The FastAPI application: routes, errors and what stands around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from starlette.types import Scope

import paceline
from paceline.engine.engine import Engine
from paceline.serve import chat, completions, errors, playground, status, tokens
from paceline.serve.middleware import BodyMiddleware, KeyMiddleware, RecordMiddleware
from paceline.serve.record import RequestRecord
from paceline.serve.service import ServerSettings, Service

if TYPE_CHECKING:
    from paceline.serve.spans import Spans


def create_app(engine: Engine, settings: ServerSettings, *, spans: Spans | None = None) -> FastAPI:
    """An app that answers with this engine, which is the app's alone from its start to its end.

    The engine describes its steps (`TracedEngine`), or requests that want details are refused. spans: where requests
    are traced to.
    """
    service = Service(engine, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await service.engine.close(drain_seconds=settings.drain_seconds)
        if spans is not None:
            await run_in_threadpool(spans.close)

    app = FastAPI(
        title="Paceline",
        version=paceline.__version__,
        summary="Speculative decoding behind OpenAI's API.",
        lifespan=lifespan,
        docs_url=None,  # these pages would load their scripts from elsewhere; /openapi.json stays
        redoc_url=None,
    )
    app.state.service = service
    for part in (chat, completions, tokens, status, playground):
        app.include_router(part.router)
    errors.install(app)

    def report(scope: Scope, record: RequestRecord) -> None:
        if (route := scope.get("route")) is not None:
            service.metrics.count(route.path, record.status)
        if spans is not None:
            spans.report(scope, record)

    # The last that is added comes first
    app.add_middleware(BodyMiddleware, max_bytes=settings.max_body_bytes, seconds=settings.body_seconds)
    if settings.api_key is not None:
        app.add_middleware(KeyMiddleware, api_key=settings.api_key)
    app.add_middleware(RecordMiddleware, report=report, log=settings.log_requests)
    return app
