"""From a chat request to the prompt's text: messages as a template wants them, and tools where it reads none."""

from __future__ import annotations

import json
from typing import Any

from paceline.errors import ConfigError, PromptError
from paceline.interfaces import Tokenizer
from paceline.serve import calls, reasoning
from paceline.serve.answer import AnswerFormat
from paceline.serve.errors import ApiError, bad_field
from paceline.serve.parameters import text_of
from paceline.serve.protocol import ChatRequest, FunctionDefinition, Message, NamedToolChoice, Tool

_INSTRUCTIONS = """You can call tools. Each line describes one of them:
{tools}
To call one, answer with its name and arguments as JSON, between tags:
{open}
{{"name": "...", "arguments": {{...}}}}
{close}"""


def render(messages: list[Message], tokenizer: Tokenizer, *, tools: list[Tool], variables: dict[str, Any]) -> str:
    """The prompt's text. Raises ApiError for what the model's template cannot show."""
    if not tokenizer.has_chat_template:
        raise ApiError(400, "this model has no chat template: use /v1/completions.", param="messages")
    for index, message in enumerate(messages):
        _check(message, f"messages.{index}")
    turns = [_turn(message) for message in messages]
    described = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]
    if not tokenizer.template_reads_tools:
        turns = _as_text(turns, described)
        described = []
    try:
        return tokenizer.render_chat(turns, tools=described or None, variables=variables)
    except (ConfigError, PromptError) as error:
        raise ApiError(400, str(error), param="messages") from error


def answer_format(prompt: str, tokenizer: Tokenizer, tools: list[Tool]) -> AnswerFormat:
    """What to look for in the answer to a prompt."""
    end = prompt.rstrip()
    return AnswerFormat(
        reasons=tokenizer.template_mentions(reasoning.CLOSE) and not end.endswith(reasoning.CLOSE),
        reasoning_opened=end.endswith(reasoning.OPEN),
        tools=frozenset(tool.function.name for tool in tools),
    )


def grammar_marker(prompt: str, tokenizer: Tokenizer) -> str | None:
    """The end of the reasoning, where a grammar begins if the model reasons first; None = at once."""
    form = answer_format(prompt, tokenizer, [])
    thinks = form.reasoning_opened or (form.reasons and tokenizer.template_mentions("enable_thinking"))
    return reasoning.CLOSE if thinks else None


def usable_tools(request: ChatRequest) -> list[Tool]:
    """The tools that the model may call. Raises ApiError for a choice without tools, or of one that is not there."""
    tools = request.tools or []
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_field("tools", "two functions share a name: rename one.")
    choice = request.tool_choice
    if choice not in (None, "none", "auto") and not tools:
        raise bad_field("tool_choice", "there are no tools to choose from: give tools, too.")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise bad_field("tool_choice", f"no tool is named {choice.function.name!r:.80}: name one of the tools.")
    return [] if choice == "none" else tools


def forced_calls(request: ChatRequest) -> list[FunctionDefinition]:
    """The functions of which one must be called; none where the model is free."""
    choice, functions = request.tool_choice, [tool.function for tool in request.tools or []]
    if isinstance(choice, NamedToolChoice):
        return [function for function in functions if function.name == choice.function.name]
    return functions if choice == "required" else []


def _check(message: Message, place: str) -> None:
    if message.content is None and message.role != "assistant":
        raise bad_field(f"{place}.content", "missing: give text.")
    if message.role == "tool" and message.tool_call_id is None:
        raise bad_field(f"{place}.tool_call_id", "missing: give the id of the call that this is the result of.")


def _turn(message: Message) -> dict[str, Any]:
    """A message as templates read it: arguments of calls are objects, and what is not there is left out."""
    role = "system" if message.role == "developer" else message.role
    if isinstance(message.content, list):
        text_of(message.content, "messages")  # nothing else is supported
    turn: dict[str, Any] = {"role": role, "content": "" if message.content is None else message.content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    return turn


def _arguments(call: Any) -> Any:
    try:
        return json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise bad_field(
            "messages", f"the arguments of a tool call are not JSON ({error}): send them back as they came."
        ) from error


def _as_text(turns: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation for a template that knows neither tools nor their calls and results."""
    plain: list[dict[str, Any]] = []
    for turn in turns:
        if turn["role"] == "tool":
            turn = {"role": "user", "content": f"<tool_response>\n{_text(turn['content'])}\n</tool_response>"}
        elif "tool_calls" in turn:
            written = [json.dumps(call["function"], ensure_ascii=False) for call in turn["tool_calls"]]
            tagged = [f"{calls.OPEN}\n{text}\n{calls.CLOSE}" for text in written]
            turn = {"role": turn["role"], "content": "\n".join([*filter(None, [_text(turn["content"])]), *tagged])}
        plain.append(turn)
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=lines, open=calls.OPEN, close=calls.CLOSE)
    if plain[0]["role"] == "system":
        instructions = f"{_text(plain[0]['content'])}\n\n{instructions}"
        plain = plain[1:]
    return [{"role": "system", "content": instructions}, *plain]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content)
