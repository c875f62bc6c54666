"""A span for each request that generates, below the client's."""

from __future__ import annotations

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from live_server import serving, toy
from paceline.serve.spans import Spans

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def test_spans():
    exporter = InMemorySpanExporter()
    with serving(toy(), spans=Spans(exporter, model="toy")) as live:
        live.post("/v1/completions", json={"prompt": "ab", "max_tokens": 4, "temperature": 0}, headers=PARENT)
        live.post("/v1/chat/completions", json={})
        live.get("/health")
    first, second = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time)
    assert first.name == "text_completion toy"
    assert f"{first.parent.span_id:016x}" == "b7ad6b7169203331"
    assert first.attributes["gen_ai.usage.output_tokens"] == 4
    assert first.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert first.attributes["paceline.acceptance_length"] == 1.0
    assert first.end_time > first.start_time
    assert (second.name, second.attributes["http.response.status_code"]) == ("chat toy", 400)
