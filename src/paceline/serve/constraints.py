"""From a request's formats to the grammar that its output must follow."""

from __future__ import annotations

import json
from typing import Any

from paceline.errors import ConfigError
from paceline.params import Grammar
from paceline.serve.errors import bad_field
from paceline.serve.protocol import FunctionDefinition, Generation

_ONE_LINE = {"whitespace_pattern": "", "item_separator": ", ", "key_separator": ": "}  # as models write calls
_GUIDES = ("guided_json", "guided_regex", "guided_grammar", "guided_choice")


def grammar_of(request: Generation, *, after: str | None) -> Grammar | None:
    """The one grammar that a request asks for, to begin after a marker in the text if one is given; None = free."""
    given = grammar_fields(request)
    if len(given) > 1:
        raise bad_field(given[0], f"{given[1]} names another format: give one of them.")
    try:
        return _grammar(request, after=after)
    except ConfigError as error:  # it speaks of the grammar's own fields
        raise bad_field(given[0], str(error)) from error


def grammar_fields(request: Generation) -> list[str]:
    """The fields by which a request asks for a format."""
    given = [name for name in _GUIDES if getattr(request, name) is not None]
    formatted = request.response_format is not None and request.response_format.type != "text"
    return [*given, *(["response_format"] if formatted else [])]


def _grammar(request: Generation, *, after: str | None) -> Grammar | None:
    wanted = request.response_format
    if wanted is not None and wanted.type != "text":
        if wanted.type == "json_object":
            return Grammar.json_object(after=after)
        if wanted.json_schema is None:
            raise bad_field("response_format", "json_schema is missing: give it as {name, schema}.")
        return Grammar.json_schema(wanted.json_schema.schema_, after=after)
    if request.guided_json is not None:
        return Grammar.json_schema(_schema(request.guided_json), after=after)
    if request.guided_regex is not None:
        return Grammar.regex(request.guided_regex, after=after)
    if request.guided_grammar is not None:
        return Grammar.lark(request.guided_grammar, after=after)
    if request.guided_choice is not None:
        return Grammar.choice(request.guided_choice, after=after)
    return None


def call_grammar(functions: list[FunctionDefinition], *, after: str | None) -> Grammar:
    """Exactly one call of one of these functions, as a JSON object."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, "arguments": _arguments(function)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return Grammar.json_schema({"anyOf": calls, "x-guidance": _ONE_LINE}, after=after)


def _arguments(function: FunctionDefinition) -> dict[str, Any]:
    """The schema of a call's arguments, without others than it names: what a function lacks cannot be passed to it."""
    schema = {"type": "object", **(function.parameters or {})}
    return {"additionalProperties": False, **schema} if "properties" in schema else schema


def _schema(value: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise bad_field("guided_json", f"not valid JSON ({error}): send a schema, or its text.") from error
    if not isinstance(schema, dict):
        raise bad_field("guided_json", 'a schema must be a JSON object; send one such as {"type": "object"}.')
    return schema
