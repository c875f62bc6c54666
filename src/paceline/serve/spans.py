"""OpenTelemetry: a span for each request, below the client's own if it sends one. Names are the GenAI conventions'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode
from starlette.datastructures import Headers
from starlette.types import Scope

from paceline.serve.record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


class Spans:
    """Turns records of requests that generated something into spans, and sends these in batches."""

    def __init__(self, exporter: SpanExporter, *, model: str) -> None:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._model = model
        self._provider = TracerProvider(resource=Resource.create({"service.name": "paceline"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("paceline.serve")

    @classmethod
    def to(cls, endpoint: str, *, model: str) -> Spans:
        """To an OTLP collector, such as http://localhost:4318."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces"), model=model)

    def report(self, scope: Scope, record: RequestRecord) -> None:
        """The span of a request that is over."""
        operation = _OPERATIONS.get(record.path)
        if operation is None:
            return
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=extract(dict(Headers(scope=scope))),
            kind=SpanKind.SERVER,
            start_time=record.started_ns,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.request.model": self._model,
                "gen_ai.usage.input_tokens": record.num_prompt_tokens,
                "gen_ai.usage.output_tokens": record.num_output_tokens,
                "gen_ai.response.finish_reasons": record.finish_reasons,
                "http.response.status_code": record.status,
            },
        )
        if record.acceptance_length is not None:
            span.set_attribute("paceline.acceptance_length", record.acceptance_length)
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=record.started_ns + int(1e9 * record.seconds))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()
