"""Chat templates against transformers' renderer."""

from __future__ import annotations

import json

import pytest

from paceline.errors import ConfigError, PromptError
from paceline.models.chat_template import ChatTemplate

CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " <b> & \n\n x "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c 你好"},
    ],
]
LLAMA3_LIKE = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start|>' + message['role']"
    " + '\n\n' + message['content'] | trim + '<|eot|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n\n' }}{% endif %}"
)
GEMMA_LIKE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\n\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {{ '<start_of_turn>' + message['role'] + '\n' + (prefix if loop.first else "") }}
    {{ message['content'] | trim }}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}
"""
EXTRAS = """
{% set ns = namespace(count=0) %}
    {% for message in messages %}
        {% if message.role == 'system' %}{% continue %}{% endif %}
        {% set ns.count = ns.count + 1 %}
        {% if message.role == 'assistant' %}
        {% generation %}
        {{ message.content }}{{ eos_token }}
        {% endgeneration %}
        {% else %}
        {{ ns.count }} {{ message | tojson }} {{ {'b': 1, 'a': '<'} | tojson(indent=2, sort_keys=true) }}
        {% endif %}
        {% if loop.index > 2 %}{% break %}{% endif %}
    {% endfor %}
{{ tools is none }} {{ undefined_thing }} {{ '%Y' | length }}
"""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def _transformers(source: str, messages: list, *, add_generation_prompt: bool, special: dict[str, str]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=add_generation_prompt, **special
    )
    return rendered[0]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("source", [LLAMA3_LIKE, GEMMA_LIKE, EXTRAS])
def test_as_transformers_renders(source, messages, add_generation_prompt):
    expected = _transformers(source, messages, add_generation_prompt=add_generation_prompt, special=SPECIAL)
    template = ChatTemplate(source, special_tokens=SPECIAL)
    assert template.render(messages, add_generation_prompt=add_generation_prompt) == expected


def _assert_model_template(model) -> None:
    source = model.tokenizer._chat_template._source
    special = model.tokenizer._chat_template._special_tokens
    for messages in CONVERSATIONS:
        expected = _transformers(source, messages, add_generation_prompt=True, special=special)
        assert model.tokenizer.render_chat(messages) == expected


def test_smollm2_template(smollm2):
    _assert_model_template(smollm2)


@pytest.mark.slow
def test_qwen_template():
    from paceline.models.loader import load

    _assert_model_template(load("qwen2.5-coder-1.5b", progress=False))


def test_date_is_there():
    assert len(ChatTemplate("{{ strftime_now('%Y') }}", special_tokens={}).render(CONVERSATIONS[0])) == 4


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must"),
        ("{{ messages[3].content.x }}", "no element 3"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10**9) %}{% endfor %}", "[Rr]ange too big"),
    ],
)
def test_failing_templates_are_one_line_errors(source, reason):
    with pytest.raises(ConfigError, match=rf"^the model's chat template failed \(.*{reason}") as caught:
        ChatTemplate(source, special_tokens={}).render(CONVERSATIONS[0])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, ["hi"], [{"content": "x"}], [None]])
def test_malformed_messages(messages):
    with pytest.raises(PromptError, match="must be"):
        ChatTemplate("x", special_tokens={}).render(messages)


PARTS_ONLY = (
    "{% for message in messages %}<{{ message.role }}>{% for item in message['content'] %}"
    "{% if item.type == 'text' %}[{{ item.text }}]{% endif %}{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for item in message.content | selectattr('type', 'equalto', 'text') %}{{ item.text }}|{% endfor %}"
    "{% endif %}{% endfor %}"
)


def _parts(*texts: str) -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]


@pytest.mark.parametrize("source", [PARTS_ONLY, EITHER])
def test_templates_that_read_parts_get_them(source):
    expected = _transformers(source, _parts("a", "b"), add_generation_prompt=True, special=SPECIAL)
    assert ChatTemplate(source, special_tokens=SPECIAL).render(_parts("a", "b")) == expected


@pytest.mark.parametrize("source", [LLAMA3_LIKE, GEMMA_LIKE, EXTRAS])
def test_other_templates_get_the_text_of_parts(source):
    template = ChatTemplate(source, special_tokens=SPECIAL)
    assert template.render(_parts("a", "b")) == template.render([{"role": "user", "content": "a\nb"}])


@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio", "video"])
def test_multimodal_parts_are_refused(kind):
    messages = [*_parts("look"), {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind, kind: {}}]}]
    with pytest.raises(PromptError, match=rf"'{kind}': multimodal input is not supported") as caught:
        ChatTemplate(EITHER, special_tokens={}).render(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "part", ["x", None, {"text": "x"}, {"type": "text"}, {"type": "text", "text": 3}, {"type": []}]
)
def test_malformed_parts(part):
    with pytest.raises(PromptError, match="each content part must be"):
        ChatTemplate(EITHER, special_tokens={}).render([{"role": "user", "content": [part]}])


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": "x"}]
    before = json.dumps(messages)
    with pytest.raises(ConfigError):
        ChatTemplate("{{ messages[0].update({'role': 'system'}) }}", special_tokens={}).render(messages)
    assert json.dumps(messages) == before


def test_tools_and_variables_reach_templates_that_name_them():
    source = "{% if tools %}{{ tools | tojson }}{% endif %}{% if thinks is defined and not thinks %}.{% endif %}"
    template = ChatTemplate(source, special_tokens={})
    messages = [{"role": "user", "content": "x"}]
    assert template.reads_tools
    assert template.render(messages, tools=[{"name": "f"}], variables={"thinks": False}) == '[{"name": "f"}].'
    assert template.render(messages) == ""
    assert template.render(messages, variables={"messages": [], "tools": [1]}) == ""  # not theirs to set


def test_templates_without_tools():
    template = ChatTemplate("{{ messages[0].tools }}", special_tokens={})
    assert not template.reads_tools
    assert template.mentions("messages[0]")
    assert not template.mentions("<think>")
