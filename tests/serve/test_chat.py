"""/v1/chat/completions through the real client: each parameter, streamed and not, equal to the engine alone."""

from __future__ import annotations

import itertools
import json
from typing import Any

import openai
import pytest

from live_server import TOKENIZER, toy
from paceline.params import SamplingParams
from paceline.types import RequestOutput
from toy_engine import run

MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab ab ab"}]
PROMPT = TOKENIZER.encode("system: be brief\nuser: ab ab ab\nassistant: ", add_special_tokens=False)
CASES = {
    "greedy": ({"temperature": 0}, SamplingParams()),
    "seed": ({"seed": 7}, SamplingParams(temperature=1.0, seed=7)),
    "negative seed": ({"seed": -1}, SamplingParams(temperature=1.0, seed=2**64 - 1)),
    "temperature": ({"seed": 7, "temperature": 0.4}, SamplingParams(temperature=0.4, seed=7)),
    "top_p": ({"seed": 7, "top_p": 0.5}, SamplingParams(temperature=1.0, seed=7, top_p=0.5)),
    "top_k": ({"seed": 7, "top_k": 2}, SamplingParams(temperature=1.0, seed=7, top_k=2)),
    "all of top_k": ({"seed": 7, "top_k": -1}, SamplingParams(temperature=1.0, seed=7)),
    "min_p": ({"seed": 7, "min_p": 0.3}, SamplingParams(temperature=1.0, seed=7, min_p=0.3)),
    "presence": ({"temperature": 0, "presence_penalty": 1.5}, SamplingParams(presence_penalty=1.5)),
    "frequency": ({"temperature": 0, "frequency_penalty": 1.5}, SamplingParams(frequency_penalty=1.5)),
    "repetition": ({"temperature": 0, "repetition_penalty": 1.5}, SamplingParams(repetition_penalty=1.5)),
    "logit_bias": ({"temperature": 0, "logit_bias": {"5": 100}}, SamplingParams(logit_bias={5: 100.0})),
    "min_tokens": (
        {"temperature": 0, "min_tokens": 20, "logit_bias": {"1": 4}}, SamplingParams(min_tokens=20, logit_bias={1: 4.0})
    ),
    "stop_token_ids": ({"temperature": 0, "stop_token_ids": [40, 41]}, SamplingParams(stop_token_ids=(40, 41))),
    "ignore_eos": (
        {"temperature": 0, "ignore_eos": True, "logit_bias": {"1": 9}},
        SamplingParams(ignore_eos=True, logit_bias={1: 9.0}),
    ),
    "special tokens": (
        {"temperature": 0, "ignore_eos": True, "skip_special_tokens": False, "logit_bias": {"1": 9}},
        SamplingParams(ignore_eos=True, skip_special_tokens=False, logit_bias={1: 9.0}),
    ),
    "n": ({"seed": 3, "n": 3}, SamplingParams(temperature=1.0, seed=3, n=3)),
    "plain": ({"seed": 3, "speculative": False}, SamplingParams(temperature=1.0, seed=3)),
    "fewer drafts": (
        {"seed": 3, "speculative": {"num_speculative_tokens": 1}}, SamplingParams(temperature=1.0, seed=3)
    ),
    "prediction": (
        {"seed": 3, "prediction": {"type": "content", "content": "some guess"}}, SamplingParams(temperature=1.0, seed=3)
    ),
    "harmless": (
        {"temperature": 0, "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto",
         "parallel_tool_calls": True, "safety_identifier": "x", "prompt_cache_key": "y"},
        SamplingParams(),
    ),
    "nulls": (
        dict.fromkeys(["stop", "n", "logit_bias", "top_p", "seed", "tools", "tool_choice", "response_format"])
        | {"temperature": 0},
        SamplingParams(),
    ),
}  # fmt: skip
OURS = {
    "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "speculative", "metrics", "priority", "guided_json", "guided_regex", "guided_grammar", "guided_choice",
}  # fmt: skip


def alone(params: SamplingParams, **changes: Any) -> RequestOutput:
    """What an engine without a server and without a drafter says."""
    values = {name: getattr(params, name) for name in params.__slots__} | {"max_tokens": 40} | changes
    [output] = run(toy(), [PROMPT], SamplingParams(**values))
    return output


def arguments(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields as the client takes them: those that OpenAI does not know go through extra_body."""
    extra = {name: value for name, value in fields.items() if name in OURS}
    known = {name: value for name, value in fields.items() if name not in OURS}
    return {"model": "toy", "messages": MESSAGES, "max_tokens": 40, **known, "extra_body": extra}


def streamed(client: openai.OpenAI, **fields: Any) -> dict[int, dict[str, Any]]:
    """The choices that the chunks add up to."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in client.chat.completions.create(stream=True, **fields):
        for part in chunk.choices:
            choice = choices.setdefault(part.index, {"content": "", "finish_reason": None, "logprobs": []})
            assert choice["finish_reason"] is None, "nothing comes after the end"
            choice["content"] += part.delta.content or ""
            choice["finish_reason"] = part.finish_reason
            choice["logprobs"] += (part.logprobs.content or []) if part.logprobs else []
    return choices


@pytest.mark.parametrize("case", CASES)
def test_each_parameter(toy_server, case):
    fields, params = CASES[case]
    expected = alone(params)
    client = toy_server.client()
    answer = client.chat.completions.create(**arguments(fields))
    assert [choice.message.content for choice in answer.choices] == [choice.text for choice in expected.outputs]
    assert [choice.finish_reason for choice in answer.choices] == [c.finish_reason for c in expected.outputs]
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in expected.outputs)
    choices = streamed(client, **arguments(fields))
    assert [choices[c.index]["content"] for c in expected.outputs] == [c.text for c in expected.outputs]
    assert [choices[c.index]["finish_reason"] for c in expected.outputs] == [c.finish_reason for c in expected.outputs]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limit(toy_server, name):
    fields = arguments({"temperature": 0, "ignore_eos": True})
    del fields["max_tokens"]
    answer = toy_server.client().chat.completions.create(**fields, **{name: 5})
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "length"


def test_without_a_limit_the_context_is_one(toy_server):
    fields = arguments({"temperature": 0, "ignore_eos": True})
    del fields["max_tokens"]
    answer = toy_server.client().chat.completions.create(**fields)
    assert answer.usage.total_tokens == toy_server.engine.runner.max_model_len


@pytest.mark.parametrize("several", [False, True])
def test_stop(toy_server, several):
    text = alone(SamplingParams()).text
    stop = text[4:6]
    fields = arguments({"temperature": 0, "stop": ["\x0b\x0c", stop] if several else stop})
    expected = alone(SamplingParams(stop=(stop,)))
    answer = toy_server.client().chat.completions.create(**fields)
    assert answer.choices[0].message.content == expected.text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["stop_reason"] == stop
    assert streamed(toy_server.client(), **fields)[0]["content"] == expected.text


@pytest.mark.parametrize("top", [None, 0, 3])
def test_logprobs(toy_server, top):
    fields = arguments({"seed": 1, "logprobs": True, "top_logprobs": top})
    expected = alone(SamplingParams(temperature=1.0, seed=1, logprobs=top or 0)).outputs[0]
    answer = toy_server.client().chat.completions.create(**fields).choices[0]
    pieces = streamed(toy_server.client(), **fields)[0]["logprobs"]
    for got in (answer.logprobs.content, pieces):
        assert [entry.logprob for entry in got] == [pytest.approx(entry.logprob) for entry in expected.logprobs]
        assert [entry.token for entry in got] == [TOKENIZER.token_text(i) for i in expected.token_ids]
        assert [bytes(entry.bytes).decode() for entry in got] == [entry.token for entry in got]
        tops = [[(t.token, pytest.approx(t.logprob)) for t in entry.top_logprobs] for entry in got]
        assert tops == [[(TOKENIZER.token_text(i), p) for i, p in entry.top] for entry in expected.logprobs]


def test_usage_in_the_last_chunk(toy_server):
    fields = arguments({"temperature": 0})
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(toy_server.client().chat.completions.create(**fields, **options))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    whole = toy_server.client().chat.completions.create(**fields)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_content_parts_and_a_turn_that_is_sent_back(toy_server):
    client = toy_server.client()
    first = client.chat.completions.create(**arguments({"temperature": 0}))
    parts = [{"type": "text", "text": "ab"}]
    messages = [*MESSAGES, first.choices[0].message, {"role": "user", "content": parts}]
    plain = [*MESSAGES, {"role": "assistant", "content": first.choices[0].message.content}]
    plain += [{"role": "user", "content": "ab"}]
    answers = [
        client.chat.completions.create(model="toy", messages=m, temperature=0, max_tokens=9) for m in (messages, plain)
    ]
    expected = [answer.choices[0].message.content for answer in answers]
    assert expected[0] == expected[1]


@pytest.mark.parametrize("level", [None, "none", "summary", "detailed"])
def test_metrics(toy_server, level):
    fields = arguments({"temperature": 0, "metrics": level})
    answer = toy_server.client().chat.completions.create(**fields)
    if level in (None, "none"):
        assert "metrics" not in answer.model_extra
        return
    metrics = answer.model_extra["metrics"]
    speculation = metrics["speculative_decoding"]
    assert speculation["num_draft_tokens"] >= speculation["num_accepted_draft_tokens"] > 0
    assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"]
    assert ("steps" in metrics) == (level == "detailed")
    chunks = list(toy_server.client().chat.completions.create(stream=True, **fields))
    assert chunks[-1].model_extra["metrics"]["speculative_decoding"] == speculation
    if level == "detailed":
        known = [chunk.model_extra["metrics"].get("steps", []) for chunk in chunks if "metrics" in chunk.model_extra]
        for steps in (metrics["steps"], list(itertools.chain.from_iterable(known))):
            check_steps(steps, answer.choices[0].message.content, speculation)


def check_steps(steps: list[dict[str, Any]], text: str, speculation: dict[str, Any]) -> None:
    """Steps tell the same story as the text and the sums."""
    tokens = [token for step in steps for token in step["tokens"]]
    assert "".join(token["text"] for token in tokens) == text
    assert sum(len(step["nodes"]) for step in steps) == speculation["num_draft_tokens"]
    accepted = [token for token in tokens if token["origin"] == "accepted"]
    assert len(accepted) == speculation["num_accepted_draft_tokens"]
    assert all(token["proposers"] == ["ngram"] and token["logprob"] <= 0 for token in accepted)
    assert all(token["proposers"] == [] for token in tokens if token["origin"] != "accepted")
    for step in steps:
        fates = [node["fate"] for node in step["nodes"]]
        assert [index for index, fate in enumerate(fates) if fate == "accepted"] == list(step["path"])


def test_responses_are_json_of_openais_shape(toy_server):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 3}
    answer = toy_server.post("/v1/chat/completions", json=body).json()
    assert answer.keys() == {"id", "created", "model", "object", "choices", "usage"}
    assert (answer["object"], answer["model"]) == ("chat.completion", "toy")
    stream = toy_server.post("/v1/chat/completions", json=body | {"stream": True})
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = stream.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["delta"] == {"role": "assistant", "content": ""}
