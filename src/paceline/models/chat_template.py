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

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation.

        Raises PromptError for messages without a role, ConfigError where the template fails or refuses the messages.
        """
        if isinstance(messages, (str, Mapping)) or not messages:
            raise PromptError('messages must be a list of {"role": ..., "content": ...}, at least one.')
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise PromptError(f'each message must be {{"role": ..., "content": ...}}; got {message!r:.80}.')
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program: anything can come out of it
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(
                f"the model's chat template failed ({reason[0][:200]}): check roles and their order, or pass a prompt."
            ) from error

    @cached_property
    def _template(self) -> Any:
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
        return environment.from_string(self._source)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys=False):
    # positional parameters: templates call it as transformers declares it
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
