"""GET /v1/models, /health and /metrics: what is served, and how it does."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import PlainTextResponse, Response

from paceline.serve.errors import ApiError
from paceline.serve.service import Service, service_of

router = APIRouter()


@router.get("/v1/models")
async def models(service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    """The names under which the one model is served."""
    return {"object": "list", "data": [_model(service, name) for name in service.settings.model_names]}


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    """One of them."""
    service.check_model(name)
    return _model(service, name)


@router.get("/health")
async def health(service: Annotated[Service, Depends(service_of)]) -> dict[str, str]:
    """200 while requests are taken, 503 while the server shuts down, and once its engine has failed."""
    if not service.engine.alive:
        raise ApiError(
            503, "the engine takes no requests, for it shuts down or has failed: ask another one.", code="engine_closed"
        )
    return {"status": "ok"}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: Annotated[Service, Depends(service_of)]) -> Response:
    """Counters, gauges and histograms for Prometheus; docs/glossary.md says what they count."""
    content, media_type = service.metrics.exposition()
    return Response(content, media_type=media_type)


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "paceline",
        "max_model_len": service.max_model_len,
        "speculation": service.speculation,
    }
