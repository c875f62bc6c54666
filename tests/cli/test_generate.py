"""`paceline generate` on a tiny model: stdout holds the text or one JSON object, and nothing else."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app

SHORT = ("--max-tokens", "24", "--ignore-eos", "--kv-cache-memory", "4M", "--threads", "1")


def generate(model, *options, prompt="ab ab ab", **kwargs):
    result = CliRunner().invoke(app, ["generate", str(model), "--prompt", prompt, *SHORT, *options], **kwargs)
    assert result.exit_code == 0, result.output
    return result


def as_json(model, *options, **kwargs):
    return json.loads(generate(model, "--json", *options, **kwargs).stdout)


def test_text_on_stdout_and_the_rest_on_stderr(tiny_llama):
    result = generate(tiny_llama)
    assert result.stdout == as_json(tiny_llama)["text"] + "\n"
    assert "tokens/s" in result.stderr
    assert "float32 safetensors" in result.stderr


def test_json_fields(tiny_llama):
    value = as_json(tiny_llama, "--seed", "5", "--temperature", "0.8", "--speculation", "ngram")
    assert (value["seed"], value["lossless"], value["reproducible"]) == (5, True, True)
    assert len(value["token_ids"]) == 24
    assert value["finish_reason"] == "length"
    assert value["choices"][0]["token_ids"] == value["token_ids"]
    metrics = value["metrics"]["speculative_decoding"]
    histogram = metrics["acceptance_histogram"]
    assert sum(histogram) == metrics["num_spec_steps"] <= metrics["num_steps"] < 24
    accepted_per_step = metrics["num_accepted_draft_tokens"] / metrics["num_steps"]
    assert metrics["mean_acceptance_length"] == pytest.approx(1 + accepted_per_step)
    assert sum(k * count for k, count in enumerate(histogram)) == metrics["num_accepted_draft_tokens"]
    assert metrics["num_draft_tokens"] >= metrics["num_accepted_draft_tokens"]
    assert value["timings"]["decode_seconds"] > 0


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_the_drafter_does_not_change_the_ids(tiny_llama, temperature):
    options = ("--temperature", temperature, "--seed", "3")
    plain = as_json(tiny_llama, *options, "--speculation", "none")
    drafted = as_json(tiny_llama, *options, "--speculation", '{"method": "ngram", "num_speculative_tokens": 3}')
    assert plain["token_ids"] == drafted["token_ids"]
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_raw_leaves_the_template_out(tiny_llama, tiny_base):
    assert as_json(tiny_llama, "--raw")["num_prompt_tokens"] == len("ab ab ab")
    assert as_json(tiny_llama)["num_prompt_tokens"] > len("ab ab ab")
    assert as_json(tiny_base)["num_prompt_tokens"] == len("ab ab ab")


def test_system_message(tiny_llama):
    assert as_json(tiny_llama, "--system", "be brief")["num_prompt_tokens"] > as_json(tiny_llama)["num_prompt_tokens"]


def test_prompt_from_stdin(tiny_llama):
    assert as_json(tiny_llama, prompt="-", input="ab ab ab")["token_ids"] == as_json(tiny_llama)["token_ids"]


def test_choices_and_logprobs(tiny_llama):
    value = as_json(tiny_llama, "--n", "2", "--temperature", "1", "--seed", "1", "--logprobs", "2")
    assert [choice["index"] for choice in value["choices"]] == [0, 1]
    assert value["choices"][0]["token_ids"] != value["choices"][1]["token_ids"]
    entry = value["choices"][0]["logprobs"][0]
    assert entry["logprob"] <= 0
    assert len(entry["top"]) == 2


def test_stop_string(tiny_llama):
    whole = as_json(tiny_llama)["text"]
    stopped = as_json(tiny_llama, "--stop", whole[3:6])
    assert stopped["text"] == whole[: whole.index(whole[3:6])]
    assert stopped["finish_reason"] == "stop"


def test_answers_in_a_given_form(tiny_llama, tmp_path):
    schema = '{"enum": ["ab", "ba"]}'
    path = tmp_path / "schema.json"
    path.write_text(schema)
    texts = {}
    for options in (("--json-schema", schema), ("--json-schema", str(path)), ("--regex", "[ab]{3}")):
        command = ["generate", str(tiny_llama), "--prompt", "ab", "--kv-cache-memory", "4M", "--threads", "1", *options]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        texts[options] = result.stdout.strip()
    by_schema, by_file, by_regex = texts.values()
    assert by_schema == by_file
    assert json.loads(by_schema) in ("ab", "ba")
    assert re.fullmatch("[ab]{3}", by_regex)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--json-schema", "{}", "--regex", "a"), "exclude each other"),
        (("--json-schema", "no/such/file"), "No such file or directory"),
        (("--json-schema", "{"), "the grammar (json_schema) '{' cannot be used"),
        (("--regex", "(a"), "the grammar (regex) '(a' cannot be used"),
    ],
)
def test_wrong_forms_are_one_line(tiny_llama, options, message):
    command = ["generate", str(tiny_llama), "--prompt", "ab", "--kv-cache-memory", "4M", *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert message in result.stderr
