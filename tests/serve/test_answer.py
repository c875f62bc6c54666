"""Messages out of model text: reasoning, content and calls, and the same whatever pieces the text comes in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.serve.answer import AnswerFormat, message
from paceline.serve.calls import JsonSpan

SETTINGS = settings(deadline=None, derandomize=True)
TOOLS = frozenset({"get_weather", "add"})
WEATHER = '{"name": "get_weather", "arguments": {"city": "Pa\\"r}is", "days": [1, {"a": "}"}]}}'
WEATHER_ARGUMENTS = '{"city": "Pa\\"r}is", "days": [1, {"a": "}"}]}'
FORM = AnswerFormat(reasons=True, tools=TOOLS)
TEXTS = [
    "",
    "Plain text.",
    "<think>\nOne, two.\n</think>\n\nThree.",
    "<think>unfinished",
    "a < b <think> no reasoning in the middle </think>",
    f"<tool_call>\n{WEATHER}\n</tool_call>",
    f'Let me see.\n<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{{"name": "add", "arguments": {{}}}}\n</tool_call>\n',
    f"<think>x</think>\n{WEATHER}",
    WEATHER.replace("arguments", "parameters"),
    '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call> done',
    '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
    "<tool_call>no JSON</tool_call> more",
    '<tool_call>{"name": "add", "argum',
    '{"name": "unknown", "arguments": {}} is JSON, but no tool',
    '{"answer": {"name": "add"}}',
    '[{"name": "add", "arguments": {}}]',
    '{"name": "add", "arguments": {"a": 1',
    "  \n{",
]


def joined(form: AnswerFormat, pieces: list[str]) -> dict[str, Any]:
    """The message that a client puts together from the deltas of these pieces."""
    parser = form.parser()
    whole: dict[str, Any] = {"reasoning_content": "", "content": "", "calls": []}
    for index, piece in enumerate(pieces):
        delta = parser.feed(piece, last=index == len(pieces) - 1)
        for name in ("reasoning_content", "content"):
            whole[name] += delta.get(name, "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(whole["calls"]):
                assert call["id"].startswith("call_")
                whole["calls"].append([call["function"]["name"], ""])
            whole["calls"][call["index"]][1] += call["function"]["arguments"]
    return whole


def calls_of(whole: dict[str, Any]) -> list[list[str]]:
    return [[call["function"]["name"], call["function"]["arguments"]] for call in whole.get("tool_calls", [])]


@SETTINGS
@given(st.sampled_from(TEXTS), st.booleans(), st.data())
def test_pieces_add_up_to_the_whole(text, opened, data):
    form = AnswerFormat(reasons=True, reasoning_opened=opened, tools=TOOLS)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert joined(form, pieces) == joined(form, [text]) == joined(form, [*text, ""])


@SETTINGS
@given(st.text(alphabet='<think>/_cal{}[]":, \n\\ab'), st.data())
def test_nothing_is_lost_without_calls(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert joined(AnswerFormat(), pieces)["content"] == text
    assert joined(FORM, pieces) == joined(FORM, [text])


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nOne, two.\n</think>\n\nThree.\n", "One, two.", "Three.\n"),
        (" \n<think>a</think>b", "a", "b"),
        ("b <think>a</think>", None, "b <think>a</think>"),
        ("<think>a", "a", ""),
        ("<thin", None, "<thin"),
    ],
)
def test_reasoning(text, reasoning, content):
    whole = message(FORM, text)
    assert (whole.get("reasoning_content"), whole["content"]) == (reasoning, content)


def test_reasoning_that_the_prompt_has_opened():
    form = AnswerFormat(reasons=True, reasoning_opened=True)
    whole = message(form, "a\n</think>\nb")
    assert (whole["reasoning_content"], whole["content"]) == ("a", "b")


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (TEXTS[5], None, [["get_weather", WEATHER_ARGUMENTS]]),
        (TEXTS[6], "Let me see.\n", [["get_weather", WEATHER_ARGUMENTS], ["add", "{}"]]),
        (TEXTS[7], None, [["get_weather", WEATHER_ARGUMENTS]]),
        (TEXTS[8], None, [["get_weather", WEATHER_ARGUMENTS]]),
        (TEXTS[9], " done", [["add", '{"a": 1}']]),
        (TEXTS[10], None, [["add", '{"a": 1}']]),
        (TEXTS[11], TEXTS[11], []),
        (TEXTS[12], TEXTS[12], []),
        (TEXTS[13], TEXTS[13], []),
        (TEXTS[14], TEXTS[14], []),
        (TEXTS[16], None, [["add", '{"a": 1']]),
    ],
)
def test_calls(text, content, calls):
    whole = message(FORM, text)
    assert (whole["content"], calls_of(whole)) == (content, calls)


def test_without_tools_calls_are_text():
    assert message(AnswerFormat(), TEXTS[5])["content"] == TEXTS[5]


def test_arguments_stream_as_they_come():
    parser = FORM.parser()
    seen = [parser.feed(character).get("tool_calls") for character in TEXTS[5]]
    assert sum(map(bool, seen)) == len(WEATHER_ARGUMENTS)


@SETTINGS
@given(st.dictionaries(st.text(), st.recursive(st.none() | st.text() | st.integers(), st.lists)), st.integers(0, 99))
def test_span_ends_with_the_object(value, cut):
    text = json.dumps(value, ensure_ascii=False)
    span = JsonSpan()
    early = span.end(text[:cut])
    assert early == (len(text) if cut >= len(text) else -1)
    if early < 0:
        assert span.end(text + ' {"more": 1}') == len(text)
