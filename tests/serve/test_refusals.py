"""What is refused, and how: errors in OpenAI's shape that name the field, whatever is sent."""

from __future__ import annotations

import json
import socket

import openai
import pytest

from live_server import serving, toy

CHAT = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4, "temperature": 0}
TEXT = {"prompt": "ab", "max_tokens": 4, "temperature": 0}
CALL = {"type": "function", "function": {"name": "f"}}
BAD_CHATS = [  # the change to CHAT, the field that the error names
    ({"foo": 1}, "foo"),
    ({"temprature": 1}, "temprature"),
    ({"prompt": "ab"}, "prompt"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "3"}]}, "messages.0.tool_call_id"),
    ({"speculative": "none"}, "speculative"),
    ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.schema"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"store": True}, "store"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 10**30}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": 5}, "max_tokens"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 100}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo"),
    ({"tools": [CALL, CALL]}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [CALL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [CALL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"speculative": "yes"}, "speculative"),
    ({"speculative": {"depth": 1}}, "speculative"),
    ({"speculative": {"num_speculative_tokens": 0}}, "speculative"),
    ({"speculative": {"method": "oracle"}}, "speculative"),
    ({"guided_regex": "a" * 200_000}, "guided_regex"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "a" * 200_000}}}},
        "response_format",
    ),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_grammar": "start: b"}, "guided_grammar"),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "no"}}}}}
            ],
            "tool_choice": "required",
        },
        "tools",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "response_format"),
    ({"messages": [{"role": "user", "content": "ab" * 9000}]}, "messages"),
    ({"metrics": "all"}, "metrics"),
    ({"priority": "high"}, "priority"),
    ({"prediction": {"type": "content", "content": [{"type": "audio"}]}}, "prediction"),
]
BAD_TEXTS = [
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": ["a"] * 1000}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a"] * 200, "n": 8}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": [1] * 9000}, "prompt"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": 101}, "logprobs"),
    ({"stream": True, "echo": True, "logprobs": 1}, "echo"),
]
BAD_BODIES = [
    b"", b"null", b"[]", b'"text"', b"{", b"\xff\xfe{}", b'{"prompt": "\xff"}', b"[" * 100_000, b'{"a":' * 100_000,
    b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "top_p": -Infinity}', b'{"prompt": "a", "n": 1e999}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "\\ud800"}', b'{"\\ud800": 1, "prompt": "a"}',
]  # fmt: skip


def check(response, status: int) -> dict:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert "\n" not in body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(("change", "field"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_chat_fields(toy_server, change, field):
    error = check(toy_server.post("/v1/chat/completions", json=CHAT | change), 400)
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").split(".str")[0].startswith(field), error


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ('"guided_regex": "\\ud800"', "guided_regex"),
        ('"guided_json": {"const": "\\ud800"}', "guided_json"),
        ('"guided_choice": ["\\ud800"]', "guided_choice"),
        ('"response_format": {"type": "json_schema", "json_schema": {"schema": {"\\ud800": 1}}}', "response_format"),
        ('"prediction": {"type": "content", "content": [{"type": "text", "text": "\\ud800"}]}', "prediction"),
    ],
)
def test_lone_surrogates(toy_server, change, field):
    content = json.dumps(CHAT)[:-1] + f", {change}}}"
    headers = {"content-type": "application/json"}
    error = check(toy_server.post("/v1/chat/completions", content=content, headers=headers), 400)
    assert error["param"] == field
    assert r"\ud800" in error["message"]
    assert "at most" not in error["message"]


@pytest.mark.parametrize(("field", "limit"), [("prompt", 256), ("stop", 32)])
def test_too_many_are_called_so(toy_server, field, limit):
    error = check(toy_server.post("/v1/completions", json=TEXT | {field: ["a"] * (limit + 1)}), 400)
    assert f"at most {limit} items" in error["message"]


@pytest.mark.parametrize(("change", "field"), BAD_TEXTS, ids=lambda value: str(value)[:40])
def test_completion_fields(toy_server, change, field):
    error = check(toy_server.post("/v1/completions", json=TEXT | change), 400)
    assert (error["param"] or "").startswith(field), error


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: repr(body)[:40])
def test_bodies(toy_server, path, body):
    headers = {"content-type": "application/json"}
    check(toy_server.post(path, content=body, headers=headers), 400)


def test_huge_limits_are_limits(toy_server):
    body = TEXT | {"max_tokens": 10**18}
    answer = toy_server.post("/v1/completions", json=body).json()
    assert answer["usage"]["total_tokens"] <= toy_server.engine.runner.max_model_len


def test_prompts_beyond_the_context(toy_server):
    error = check(toy_server.post("/v1/completions", json=TEXT | {"prompt": "ab" * 1000}), 400)
    assert "2001 tokens" in error["message"]
    check(toy_server.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "ab" * 1000}]}), 400)


def test_token_ids_beyond_the_vocabulary(toy_server):
    error = check(toy_server.post("/v1/completions", json=TEXT | {"prompt": [5, 10**6]}), 400)
    assert "vocabulary" in error["message"]
    error = check(toy_server.post("/detokenize", json={"tokens": [10**6]}), 400)
    assert error["param"] == "tokens"


def test_routes(toy_server):
    assert "/v1/nothing" in check(toy_server.get("/v1/nothing"), 404)["message"]
    assert "POST" in check(toy_server.get("/v1/completions"), 405)["message"]
    assert check(toy_server.get("/v1/models/other"), 404)["code"] == "model_not_found"


def test_another_model(toy_server):
    with pytest.raises(openai.NotFoundError, match="is not served here: use toy") as caught:
        toy_server.client().completions.create(model="gpt-9", prompt="a")
    assert caught.value.code == "model_not_found"


def test_tokenize_wants_one_of_two(toy_server):
    check(toy_server.post("/tokenize", json={}), 400)
    check(toy_server.post("/tokenize", json={"prompt": "a", "messages": CHAT["messages"]}), 400)


@pytest.mark.parametrize("declared", [True, False])
def test_large_bodies(toy_server, declared):
    body = json.dumps({"prompt": "a" * 10_000_000}).encode()
    content = body if declared else iter([body[:5_000_000], body[5_000_000:]])  # without a length it is sent in chunks
    error = check(toy_server.post("/v1/completions", content=content), 413)
    assert error["code"] == "body_too_large"


def test_a_body_that_does_not_arrive():
    with serving(toy(), body_seconds=0.1) as live, socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


@pytest.fixture(scope="module")
def locked():
    with serving(toy(), api_key="secret-key") as live:
        yield live


@pytest.mark.parametrize(
    "header", [None, "secret-key", "Bearer", "Bearer other", "Bearer secret-key ", "Basic secret-key"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/metrics", "/openapi.json", "/nowhere"])
def test_keys(locked, header, path):
    headers = {} if header is None else {"authorization": header.rstrip() + "x" * header.endswith(" ")}
    response = locked.get(path, headers=headers)
    assert check(response, 401)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_the_right_key(locked):
    assert locked.client(api_key="secret-key").models.list().data[0].id == "toy"
    with pytest.raises(openai.AuthenticationError):
        locked.client(api_key="wrong").models.list()
    assert locked.get("/health").json() == {"status": "ok"}


def test_a_key_that_is_no_text(locked):
    headers = {"authorization": b"Bearer \xff\xfe"}
    check(locked.get("/v1/models", headers=headers), 401)


@pytest.mark.parametrize(
    ("path", "content", "kind", "said"),
    [
        ("/v1/chat/completions", b"{}", "text/plain", "content-type: application/json"),
        ("/v1/chat/completions", b"{}", None, "content-type: application/json"),
        ("/v1/chat/completions", b"", "application/json", "empty"),
        ("/v1/chat/completions", b"[]", "application/json", "must be a JSON object"),
        ("/v1/chat/completions", b'{"temprature": 1}', "application/json", "messages: missing"),
        ("/v1/completions", b'{"prompt": "ab", "temprature": 1}', "application/json", "did you mean temperature?"),
        (
            "/v1/completions",
            b'{"prompt": "ab", "max_completion_tokens": 4}',
            "application/json",
            "here it is max_tokens",
        ),
        ("/v1/completions", b'{"messages": []}', "application/json", "/v1/chat/completions"),
        ("/v1/chat/completions", b'{"prompt": "ab"}', "application/json", "/v1/completions"),
        ("/tokenize", b'{"text": "ab"}', "application/json", "send it as prompt"),
        ("/chat/completions", b"{}", "application/json", "did you mean /v1/chat/completions?"),
    ],
)
def test_a_refusal_says_what_to_do(toy_server, path, content, kind, said):
    response = toy_server.post(path, content=content, headers={} if kind is None else {"content-type": kind})
    assert response.status_code in (400, 404)
    assert said in response.json()["error"]["message"]
