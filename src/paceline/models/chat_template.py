"""Renders chat templates as transformers does: sandboxed jinja2 with its few extra functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from paceline.errors import ConfigError, PromptError


class ChatTemplate:
    """A model's chat template and the special tokens that it may name (bos_token, eos_token, ...)."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        tools: descriptions of functions, for a template that reads them. variables: what else the template may name.
        A content may be a list of {"type": "text", "text": ...}: a template that reads lists gets it as it is, others
        get its texts joined by line feeds. Raises PromptError for messages without a role and for content that is not
        text, ConfigError where the template fails or refuses the messages.
        """
        if isinstance(messages, (str, Mapping)) or not messages:
            raise PromptError('messages must be a list of {"role": ..., "content": ...}, at least one.')
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise PromptError(f'each message must be {{"role": ..., "content": ...}}; got {message!r:.80}.')
            _check_parts(message.get("content"))
        try:
            return self._template.render(
                **{
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": [self._readable(message) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                    "tools": tools,
                    "documents": None,
                }
            )
        except Exception as error:  # a template is a program: anything can come out of it
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(
                f"the model's chat template failed ({reason[0][:200]}): check roles and their order, or pass a prompt."
            ) from error

    @cached_property
    def reads_tools(self) -> bool:
        """Whether the template names `tools`; another one would leave them out."""
        from jinja2.meta import find_undeclared_variables

        return "tools" in find_undeclared_variables(self._environment.parse(self._source))

    def mentions(self, text: str) -> bool:
        """Whether the template writes or looks for a text, such as a tag."""
        return text in self._source

    @cached_property
    def _template(self) -> Any:
        return self._environment.from_string(self._source)

    @cached_property
    def _reads_lists(self) -> bool:
        """Whether the template loops over a content, as those that take lists of parts do."""
        from jinja2 import nodes

        def names_content(node: nodes.Node) -> bool:  # message.content, message["content"] or a variable of that name
            parts = (node, *node.find_all(nodes.Node))
            return any(value == "content" for part in parts for _, value in part.iter_fields())

        return any(names_content(loop.iter) for loop in self._environment.parse(self._source).find_all(nodes.For))

    def _readable(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of the message whose content the template can read."""
        content = message.get("content")
        if isinstance(content, (list, tuple)) and not self._reads_lists:
            return {**message, "content": "\n".join(part["text"] for part in content)}
        return dict(message)

    @cached_property
    def _environment(self) -> Any:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class GenerationTag(Extension):
            """{% generation %} marks the assistant's part for training masks; here its body is plain text."""

            tags = {"generation"}  # noqa: RUF012  (jinja's own declaration)

            def parse(self, parser):
                line = next(parser.stream).lineno
                return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
        )
        environment.filters["tojson"] = _to_json  # jinja's own escapes HTML
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment


def _check_parts(content: Any) -> None:
    """Raises PromptError for a list of parts that are not all text."""
    if not isinstance(content, (list, tuple)):
        return
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind != "text":
            raise PromptError(
                f"a content part has the type {kind!r}: multimodal input is not supported, give text only."
            )
        if kind != "text" or not isinstance(part.get("text"), str):
            raise PromptError(f'each content part must be {{"type": "text", "text": ...}}; got {part!r:.80}.')


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys=False):
    # positional parameters: templates call it as transformers declares it
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
