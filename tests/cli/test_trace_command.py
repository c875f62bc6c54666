"""`paceline trace`: what --trace wrote, for people; with colour and without."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.cli.trace import _tree
from paceline.engine.trace import (
    FORMAT,
    TraceFile,
    TraceHeader,
    TraceNode,
    TraceRequest,
    TraceSample,
    TraceStep,
    TraceToken,
    read_trace,
)

SMALL = ("--max-tokens", "24", "--ignore-eos", "--kv-cache-memory", "4M", "--threads", "1")
TIMES = {"draft": 0.1, "forward": 2.0, "verify": 0.0, "commit": 0.1}


def invoke(*args: object, code: int = 0, **options) -> str:
    result = CliRunner().invoke(app, list(map(str, args)), **options)
    assert result.exit_code == code, result.output
    return result.stderr if code else result.stdout


def node(text: str, parent: int, *, confidence: float | None = None) -> TraceNode:
    return TraceNode(ord(text[-1]), text, parent, ("ngram",), confidence, -0.6931)


def sample(text: str) -> TraceSample:
    return TraceSample(ord(text[-1]), text, -0.1054)


def step(number: int, *texts: str, kind: str = "plain", **parts) -> TraceStep:
    """A step that adds texts, the last of them its final token."""
    origins = [*["accepted"] * (len(texts) - 1), kind]
    values = {
        "step": number, "request_id": "1", "choice": 0, "position": 10 + number, "num_pending": 1, "nodes": (),
        "samples": (), "path": (), "final": sample(texts[-1]), "kind": kind, "finish_reason": None,
        "tokens": tuple(TraceToken(ord(t[-1]), t, o) for t, o in zip(texts, origins, strict=True)),
        "milliseconds": TIMES, **parts,
    }  # fmt: skip
    return TraceStep(**values)


TREE = step(
    3, " a", " b", " c", kind="recovered", path=(0, 3),
    nodes=(node(" a", -1, confidence=0.9), node(" x", 0), node(" y", 1), node(" b", 0), node(" z", 3), node("q\n", -1)),
    samples=tuple(map(sample, (" a", " b", " y", " w", " c", " v", " u"))),
)  # fmt: skip
STEPS = (
    step(1, " p"),
    step(2, " a", " e", kind="bonus", nodes=(node(" a", -1),), path=(0,)),
    TREE,
    step(4, "\x1b[2J"),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    writing = TraceFile(path)
    writing.write(TraceHeader(FORMAT, "9.9", "toy model [bold]", {}))
    for request_id in ("1", "2"):
        writing.write(TraceRequest(request_id, "once [red]", (1, 2), 7, {"n": 1}))
    writing.write(*STEPS)
    return path


def test_without_colour_marks_tell_what_became_of_each_token(file: Path) -> None:
    shown = invoke("trace", file)
    assert "toy model [bold]; paceline 9.9" in shown
    assert "request 1: 7 tokens in 4 steps, 3 of 7 nodes accepted, seed 7\nonce [red]\n" in shown
    assert "\n p{+ a+}{* e*}{+ a b+}{! c!}\\x1b[2J\n" in shown
    assert 'step 1, position 11: = " p" 0.90 plain; ms: draft 0.10, forward 2.00' in shown
    assert "step 2, position 12: 1 of 1 node by ngram accepted; ms: " in shown
    assert '+ " a" 0.50\n* " e" 0.90 bonus\n' in shown
    assert "step 3, position 13: 2 of 6 nodes by ngram accepted; ms: " in shown
    assert "\x1b" not in shown


def test_steps_of_one_line_stand_together(file: Path) -> None:
    writing = TraceFile(file)
    writing.write(TraceHeader(FORMAT, "9.9", "toy", {}), TraceRequest("1", None, (1,), 7, {"n": 1}))
    prompt = step(1, "?", tokens=(), final=None, kind=None)
    writing.write(
        prompt, step(2, "a"), step(3, "b", "c", kind="bonus", nodes=(node("b", -1),), path=(0,)), step(4, "d")
    )
    lines = [line.split(";")[0] for line in invoke("trace", file).splitlines()[2:]]
    assert lines == [
        "",
        "request 1: 4 tokens in 4 steps, 1 of 1 node accepted, seed 7",
        "1 token id",
        "a{+b+}{*c*}d",
        "",
        "step 1: 1 token of the prompt computed",
        'step 2, position 12: = "a" 0.90 plain',
        "",
        "step 3, position 13: 1 of 1 node by ngram accepted",
        '+ "b" 0.50',
        '* "c" 0.90 bonus',
        "",
        'step 4, position 14: = "d" 0.90 plain',
    ]


def test_of_a_long_prompt_the_last_words_are_shown(file: Path) -> None:
    writing = TraceFile(file)
    writing.write(TraceHeader(FORMAT, "9.9", "toy", {}), TraceRequest("1", "word " * 100, (1,), 7, {"n": 1}))
    writing.write(step(1, "a"))
    assert invoke("trace", file).splitlines()[4] == "... " + " ".join(["word"] * 40)


def test_a_tree_shows_the_fate_of_each_node() -> None:
    console = Console(color_system=None, width=200)
    with console.capture() as captured:
        for line in _tree(TREE):
            console.print(line, highlight=False)
    assert captured.get().splitlines() == [
        '├ + " a" 0.50 [0.90]',
        '│ ├ x " x" 0.50',
        '│ │ . " y" 0.50 -> " w"',
        '│ └ + " b" 0.50',
        '│   ├ x " z" 0.50 -> " v"',
        '│   └ ! " c" 0.90 recovered',
        '└ x "q\\n" 0.50 -> " u"',
    ]


def test_nodes_after_a_stop_were_not_reached() -> None:
    stopped = step(1, " a", path=(0,), nodes=(node(" a", -1), node(" b", 0), node(" c", -1)), final=None, kind=None)
    assert [line.plain for line in _tree(stopped)] == ['├ + " a" 0.50', '│ . " b" 0.50', '└ x " c" 0.50']


def test_an_impossible_probability_in_a_file_is_shown_as_one() -> None:
    odd = step(1, "a", final=replace(sample("a"), logprob=1e308), kind="recovered", nodes=(node("x", -1),))
    assert [line.plain for line in _tree(odd)] == ['├ x "x" 0.50', '└ ! "a" 1.00 recovered']


def test_drafters_are_named_where_there_are_several() -> None:
    nodes = (replace(node(" a", -1), proposers=("suffix", "recycle")), node(" b", 0))
    lines = [line.plain for line in _tree(step(1, " a", " c", kind="recovered", path=(0,), nodes=nodes))]
    assert lines == ['+ " a" 0.50 suffix+recycle', '├ x " b" 0.50 ngram', '└ ! " c" 0.90 recovered']


def test_colours_on_a_terminal(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = invoke("trace", file)
    assert "p\x1b[32m a\x1b[0m\x1b[34m e\x1b[0m\x1b[32m a b\x1b[0m\x1b[31m c\x1b[0m" in shown
    assert "{+" not in shown
    monkeypatch.setenv("NO_COLOR", "1")
    assert "{+ a+}" in invoke("trace", file)


def test_steps_and_requests_can_be_chosen(file: Path) -> None:
    for steps, expected in (("2", [2]), ("2-3", [2, 3]), ("3-", [3, 4]), ("4-99", [4])):
        shown = invoke("trace", file, "--steps", steps, "--request", "1")
        assert [int(number) for number in re.findall(r"^step (\d+)", shown, re.MULTILINE)] == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "0"], ["--steps must be", "'0'"]),
        (["--steps", "3-2"], ["--steps must be", "'3-2'"]),
        (["--steps", "a"], ["--steps must be", "'a'"]),
        (["--steps", "50-60"], ["no such steps", "end at 4"]),
        (["--request", "3"], ["no request '3'", "1, 2"]),
        (["--request", "2"], ["no such steps"]),
    ],
)
def test_choices_that_leave_nothing(file: Path, options: list[str], words: list[str]) -> None:
    line = invoke("trace", file, *options, code=2)
    assert line.count("\n") == 1
    assert all(word in line for word in words)


def test_files_that_are_no_trace(file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    for path, words in ((tmp_path / "none", "cannot read"), (tmp_path, "cannot read"), (broken, "line 1 is not")):
        line = invoke("trace", path, code=2)
        assert line.startswith("error: ")
        assert words in line
        assert line.count("\n") == 1


def test_a_line_that_was_cut_off_is_noted(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-30])
    result = CliRunner().invoke(app, ["trace", str(file)])
    assert result.exit_code == 0
    assert "cut off" in result.stderr
    assert "step 3" in result.stdout
    assert "step 4" not in result.stdout


def test_generate_writes_what_trace_shows(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    command = ("generate", tiny_llama, "--prompt", "ab ab ab", *SMALL, "--speculation", "ngram", "--json")
    plain = json.loads(invoke(*command))
    output = json.loads(invoke(*command, "--trace", path))
    assert output["token_ids"] == plain["token_ids"]
    assert output["metrics"] == plain["metrics"]
    tokens = [token for step in read_trace(str(path)).steps for token in step.tokens]
    assert [token.token_id for token in tokens] == output["token_ids"]
    accepted = output["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    assert f"24 tokens in {output['metrics']['speculative_decoding']['num_steps']} steps, {accepted} of" in invoke(
        "trace", path
    )


def test_verify_and_chat_trace_too(tiny_llama: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "category": "chat", "turns": ["ab ab ab"]}\n')
    small = ("--max-tokens", "8", "--kv-cache-memory", "4M", "--threads", "1")
    for name, options in (("verify", ("--prompts", prompts)), ("chat", ())):
        path = tmp_path / f"{name}.jsonl"
        invoke(name, tiny_llama, *options, *small, "--trace", path, input="hello\n/exit\n")
        requests = read_trace(str(path)).requests.values()
        speculation = [request.params["speculation"] for request in requests]
        assert sorted(speculation) == ([False, True] if name == "verify" else [True])


@pytest.mark.parametrize("command", [("generate", "--prompt", "x"), ("chat",), ("verify", "--prompts", "PROMPTS")])
def test_a_file_that_cannot_be_written_ends_it_before_the_model_is_looked_for(command, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "category": "chat", "turns": ["x"]}\n')
    name, *options = (str(prompts) if part == "PROMPTS" else part for part in command)
    line = invoke(name, "no-such-model", *options, "--trace", tmp_path / "no" / "file", code=2)
    assert "trace file" in line
    assert "cannot be written" in line
    assert line.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full disk to be had")
def test_a_full_disk_is_one_line(tiny_llama: Path) -> None:
    stderr = invoke("generate", tiny_llama, "--prompt", "ab", *SMALL, "--trace", "/dev/full", code=2)
    assert "No space left on device: /dev/full" in stderr
    assert stderr.count("\n") == 1
