"""`paceline chat` through a pipe, `paceline models` on an empty cache, `paceline demo` on a tiny model."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from paceline.cli import demo
from paceline.cli.main import app
from paceline.models import catalog

CHAT = ("--max-tokens", "12", "--kv-cache-memory", "4M", "--threads", "1")


def chat(model, *lines, options=()):
    result = CliRunner().invoke(app, ["chat", str(model), *CHAT, *options], input="".join(f"{x}\n" for x in lines))
    assert result.exit_code == 0, result.output
    return result


def test_turns_are_answered_until_exit(tiny_llama):
    result = chat(tiny_llama, "hello", "", "again", "/exit", "never read")
    assert result.stderr.count("tokens/s") == 2
    assert "context 512" in result.stderr


def test_end_of_input_leaves(tiny_llama):
    assert chat(tiny_llama, "hello").stderr.count("tokens/s") == 1


def test_a_message_that_is_not_utf_8_is_one_line(tiny_llama):
    result = CliRunner().invoke(app, ["chat", str(tiny_llama), *CHAT], input=b"ab\xff\nhello\n")
    assert result.exit_code == 0
    assert "error: message is not valid UTF-8 at byte 2: convert it first." in result.stderr
    assert result.stderr.count("tokens/s") == 1


def test_the_conversation_is_kept_and_reset_forgets_it(tiny_llama):
    first, other = chat(tiny_llama, "hello"), chat(tiny_llama, "other", "hello")
    reset = chat(tiny_llama, "other", "/reset", "hello")
    assert "conversation forgotten" in reset.stderr
    assert reset.stdout.endswith(first.stdout)
    assert not other.stdout.endswith(first.stdout)


def test_unknown_command_and_an_overlong_message(tiny_llama):
    result = chat(tiny_llama, "/help", "x" * 600, "hello")
    assert "error: no command '/help'" in result.stderr
    assert "/reset forgets the conversation" in result.stderr
    assert result.stderr.count("tokens/s") == 1


def test_ctrl_c_stops_the_answer_only(tiny_llama, monkeypatch):
    from paceline.llm import LLM

    stream, calls = LLM.stream, []

    def interrupted(self, prompt, params=None):
        calls.append(prompt)
        for count, delta in enumerate(stream(self, prompt, params)):
            if len(calls) == 1 and count == 3:
                raise KeyboardInterrupt
            yield delta

    monkeypatch.setattr(LLM, "stream", interrupted)
    result = chat(tiny_llama, "hello", "and now?", options=("--speculation", "none"))
    assert "stopped" in result.stderr
    assert result.stderr.count("tokens/s") == 1
    assert [message["role"] for message in calls[1]] == ["user", "assistant", "user"]
    assert len(calls[1][1]["content"]) == 3  # one character a token
    assert result.stdout.startswith(calls[1][1]["content"] + "\n")


def test_base_models_cannot_chat(tiny_base):
    result = CliRunner().invoke(app, ["chat", str(tiny_base), *CHAT], input="hello\n")
    assert result.exit_code == 2
    assert result.stderr.startswith("error:")
    assert "has no chat template" in result.stderr


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    return tmp_path


def test_models_lists_what_is_here(empty_cache):
    entry = catalog.CATALOG["smollm2-135m"]
    path = catalog.model_path(entry)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 2048)
    value = json.loads(CliRunner().invoke(app, ["models", "--json"]).stdout)
    assert {item["name"]: item["present"] for item in value} == {
        name: name == "smollm2-135m" for name in catalog.CATALOG
    }
    table = CliRunner().invoke(app, ["models"]).stdout
    assert all(name in table for name in catalog.CATALOG)
    removed = CliRunner().invoke(app, ["models", "--remove", "smollm2-135m"])
    assert removed.exit_code == 0
    assert not path.exists()
    assert "was not here" in CliRunner().invoke(app, ["models", "--remove", "smollm2-135m"]).stderr


def test_models_remove_of_an_unknown_name(empty_cache):
    result = CliRunner().invoke(app, ["models", "--remove", "smollm3"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: no model 'smollm3'")


def test_models_remove_refuses_json(empty_cache):
    result = CliRunner().invoke(app, ["models", "--remove", "smollm2-135m", "--json"])
    assert result.exit_code == 2
    assert "--json shows the list and would be ignored by --remove" in result.stderr


def test_demo_shows_the_same_texts(tiny_llama, monkeypatch):
    monkeypatch.setattr("paceline.cli.demo.MODEL", str(tiny_llama))
    monkeypatch.setattr("paceline.cli.demo.MAX_TOKENS", 12)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 0, result.output
    assert "The 5 texts are the same, token for token." in result.stdout
    for word in ("accepted", "recovered", "bonus", "speed-up", "acceptance length"):
        assert word in result.stdout
    assert "KV cache" in result.stderr
    assert "KV cache" not in result.stdout


@pytest.mark.parametrize(
    ("speedup", "words"),
    [(1.01, "no speed-up here"), (0.97, "no speed-up here"), (0.8, "slower here"), (1.3, "1.30x as fast")],
)
def test_demo_claims_no_gain_that_is_noise(speedup, words):
    assert words in demo._gain(speedup)
    assert f"{speedup:.2f}x" in demo._gain(speedup)
