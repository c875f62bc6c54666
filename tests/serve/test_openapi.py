"""The OpenAPI schema, and whatever schemathesis makes of it: no answer is a server error."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from live_server import serving, toy

MANY = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_no_server_error():
    with serving(toy(), request_seconds=1.0) as live:
        for found in schemathesis.openapi.from_url(f"{live.url}/openapi.json").get_all_operations():
            operation = found.ok()

            @MANY
            @given(operation.as_strategy())
            def send(case):
                response = case.call()
                assert response.status_code < 500, response.text
                if response.status_code >= 400:
                    assert response.json().keys() == {"error"}

            send()


def test_routes(toy_server):
    described = toy_server.get("/openapi.json").json()
    assert set(described["paths"]) == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize",
        "/health", "/metrics",
    }  # fmt: skip
