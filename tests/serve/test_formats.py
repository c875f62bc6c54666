"""Structured output, tool calls and reasoning over HTTP: forced, free, whole and streamed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from live_server import serving, toy
from paceline.testing import CharTokenizer

MESSAGES: list[Any] = [{"role": "user", "content": "ab"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}
STOP = {"type": "function", "function": {"name": "stop", "strict": True}}
GRAMMAR = 'start: "(" start ")" | "x"'


def ask(live: Any, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in list(fields) if name.startswith(("guided", "specul", "chat_template"))}
    options = {"model": "toy", "messages": MESSAGES, "seed": 4, "max_tokens": 200, **fields}
    return live.client().chat.completions.create(**options, extra_body=extra)


def put_together(chunks: Any) -> dict[str, Any]:
    """A message from its streamed deltas."""
    whole: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            whole["content"] += delta.content or ""
            whole["reasoning_content"] += (delta.model_extra or {}).get("reasoning_content") or ""
            whole["finish_reason"] = choice.finish_reason
            for call in delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(whole["calls"])
                    whole["calls"].append([call.function.name, ""])
                whole["calls"][call.index][1] += call.function.arguments
    return whole


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}, "schema"),
        ({"guided_json": SCHEMA}, "schema"),
        ({"guided_json": json.dumps(SCHEMA)}, "schema"),
        ({"guided_regex": "[ab]{3}-[0-9]+x"}, re.compile("[ab]{3}-[0-9]+x")),
        ({"guided_choice": ["yes, sir", "no"]}, re.compile("yes, sir|no")),
        ({"guided_grammar": GRAMMAR}, re.compile(r"(\()*x(\))*")),
    ],
    ids=lambda value: str(value)[:30],
)
def test_formats(toy_server, fields, holds):
    answer = ask(toy_server, **fields).choices[0]
    plain = ask(toy_server, **fields, speculative=False).choices[0]
    streamed = put_together(ask(toy_server, stream=True, **fields))
    text = answer.message.content
    assert text == plain.message.content == streamed["content"]
    if answer.finish_reason == "stop":
        if holds == "schema":
            value = json.loads(text)
            assert value.keys() == {"a", "b"}
            assert 0 <= value["a"] <= 99
        else:
            assert holds.fullmatch(text)


def test_json_object(toy_server):
    answer = ask(toy_server, response_format={"type": "json_object"}, max_tokens=200).choices[0]
    assert answer.message.content.startswith("{")
    if answer.finish_reason == "stop":
        json.loads(answer.message.content)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_forced_calls(toy_server, choice):
    tools = [ADD] if choice == "required" else [STOP, ADD]
    answer = ask(toy_server, tools=tools, tool_choice=choice).choices[0]
    assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")
    [call] = answer.message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments).keys() == {"a", "b"}
    streamed = put_together(ask(toy_server, tools=tools, tool_choice=choice, stream=True))
    assert streamed["calls"] == [["add", call.function.arguments]]
    assert streamed["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('Sure.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "Sure.\n", [["add", '{"a": 1}']]),
        ('{"name": "stop", "parameters": {}}', "", [["stop", "{}"]]),
        ('<tool_call>{"name": "stop", "arguments": {}}</tool_call>' * 2, "", [["stop", "{}"]] * 2),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
    ],
)
def test_calls_of_the_models_own(toy_server, text, content, calls):
    fields = {"tools": [ADD, STOP], "guided_choice": [text]}
    answer = ask(toy_server, **fields).choices[0]
    streamed = put_together(ask(toy_server, stream=True, **fields))
    made = [[call.function.name, call.function.arguments] for call in answer.message.tool_calls or []]
    assert (answer.message.content or "", made) == (streamed["content"], streamed["calls"]) == (content, calls)
    assert answer.finish_reason == streamed["finish_reason"] == ("tool_calls" if calls else "stop")


def test_no_calls_where_none_are_wanted(toy_server):
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    answer = ask(toy_server, tools=[ADD], tool_choice="none", guided_choice=[text]).choices[0]
    assert (answer.message.content, answer.message.tool_calls) == (text, None)


def test_a_round_of_tools(toy_server):
    """The model of a template without tools reads them as text, and their results, too."""
    first = ask(toy_server, tools=[ADD], tool_choice="required").choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}
    messages = [{"role": "system", "content": "be brief"}, *MESSAGES, first, result]
    last = ask(toy_server, messages=messages, tools=[ADD], max_tokens=5)
    assert last.usage.prompt_tokens > sum(len(str(tool)) for tool in [ADD])
    body = {"messages": [*MESSAGES, first.model_dump(), result], "return_token_strs": True}
    text = "".join(toy_server.post("/tokenize", json=body).json()["token_strs"])
    assert f'<tool_call>\n{{"name": "add", "arguments": {first.tool_calls[0].function.arguments}}}'[:38] in text
    assert "user: <tool_response>\n3\n</tool_response>" in text


class Thinking(CharTokenizer):
    """Of a model that reasons before it answers."""

    def template_mentions(self, text: str) -> bool:
        return text == "</think>"

    def render_chat(self, messages: Any, *, variables: Any = None, **options: Any) -> str:
        return super().render_chat(messages, **options) + ("<think>\n" if (variables or {}).get("open") else "")


def test_reasoning():
    with serving(toy(tokenizer=Thinking())) as live:
        fields = {"guided_choice": ["<think>\nhm, so\n</think>\n\nyes"]}
        message = ask(live, **fields).choices[0].message
        streamed = put_together(ask(live, stream=True, **fields))
        assert (message.content, message.model_extra["reasoning_content"]) == ("yes", "hm, so")
        assert (streamed["content"], streamed["reasoning_content"]) == ("yes", "hm, so")
        fields = {"guided_choice": ["yes"], "chat_template_kwargs": {"open": True}, "max_tokens": 6}
        message = ask(live, **fields).choices[0].message  # the grammar waits for the end of the reasoning
        assert message.content == ""
        assert message.model_extra["reasoning_content"]
