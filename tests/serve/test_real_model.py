"""SmolLM2 on the native engine: what the server says is what LLM says, drafted or not, alone or among others."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from live_server import serving
from paceline import LLM, SamplingParams

pytest.importorskip("paceline._native", reason="the native engine is not built")

CHATS: list[Any] = [
    [{"role": "user", "content": "Repeat word for word: the two missing screws were sent to you this morning."}],
    [{"role": "system", "content": "Answer in French."}, {"role": "user", "content": "How are you?"}],
    [{"role": "user", "content": "Write a Python function that adds two numbers. 🙂"}],
    [
        {"role": "user", "content": "I have a cat."},
        {"role": "assistant", "content": "How lovely!"},
        {"role": "user", "content": "What do I have?"},
    ],
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def plain(smollm2):
    with LLM(smollm2, speculation="none") as llm:
        yield llm


@pytest.fixture(scope="module")
def live(smollm2):
    with LLM(smollm2, speculation="suffix+recycle", step_details=True) as llm, serving(llm.engine) as live:
        yield live


def ask(live: Any, messages: Any, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in ("speculative", "metrics", "guided_json") if name in fields}
    return live.client().chat.completions.create(model="toy", messages=messages, extra_body=extra, **fields)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_among_others_are_those_of_plain_decoding(live, plain, temperature):
    expected = plain.chat(CHATS, SamplingParams(temperature=temperature, seed=5, max_tokens=48))
    fields = {"temperature": temperature, "seed": 5, "max_tokens": 48}

    def whole(messages: Any) -> str:
        return ask(live, messages, **fields).choices[0].message.content

    def streamed(messages: Any) -> str:
        chunks = ask(live, messages, stream=True, **fields)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(8) as pool:
        wholes = pool.map(whole, CHATS)
        pieces = pool.map(streamed, CHATS)
        assert list(wholes) == list(pieces) == [output.text for output in expected]


def test_logprobs_are_raw(live, plain):
    fields = {"temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    got = ask(live, CHATS[0], **fields).choices[0].logprobs.content
    [expected] = plain.chat(CHATS[0], SamplingParams(max_tokens=8, logprobs=2))
    assert [entry.logprob for entry in got] == [e.logprob for e in expected.outputs[0].logprobs]
    assert b"".join(bytes(entry.bytes) for entry in got).decode() == expected.text


def test_a_schema_holds_and_drafts_change_nothing(live):
    fields = {"guided_json": SCHEMA, "seed": 1, "max_tokens": 100}
    drafted = ask(live, [{"role": "user", "content": "Describe Ann, 30, as JSON."}], **fields).choices[0]
    undrafted = ask(live, [{"role": "user", "content": "Describe Ann, 30, as JSON."}], **fields, speculative=False)
    assert drafted.message.content == undrafted.choices[0].message.content
    value = json.loads(drafted.message.content)
    assert isinstance(value["name"], str)
    assert value["age"] <= 120


def test_a_prediction_is_counted(live):
    text = "The two missing screws were sent to you this morning."
    messages = [{"role": "user", "content": f"Repeat word for word: {text}"}]
    fields = {"temperature": 0, "max_tokens": 32}
    plain_answer = ask(live, messages, **fields)
    content = plain_answer.choices[0].message.content
    answer = ask(live, messages, prediction={"type": "content", "content": content}, metrics="detailed", **fields)
    assert answer.choices[0].message.content == content
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    tokens = [token for step in answer.model_extra["metrics"]["steps"] for token in step["tokens"]]
    copied = [token for token in tokens if "prediction" in token["proposers"]]
    assert len(copied) == details.accepted_prediction_tokens
    assert plain_answer.usage.completion_tokens_details.accepted_prediction_tokens == 0
