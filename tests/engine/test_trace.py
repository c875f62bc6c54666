"""Traces: they leave the output alone, say what happened, and are readable however the run ended."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

import engine_scenarios
from engine_scenarios import Arrival, Scenario, any_params, any_setting, arrivals
from paceline import LLM
from paceline.engine.trace import FORMAT, Trace, TraceFile, TraceHeader, TraceStep, read_trace
from paceline.engine.traced import TracedEngine
from paceline.errors import ConfigError
from paceline.params import SamplingParams
from paceline.types import RequestOutput
from toy_engine import PROMPT, TOKENIZER, make_engine, oracle, run

HEADER = TraceHeader(FORMAT, "1", "toy", {})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def traced(path: Path, *args: Any, **options: Any) -> TracedEngine:
    """make_engine's engine, traced."""
    file = TraceFile(path)
    file.write(HEADER)
    engine = make_engine(*args, kind=partial(TracedEngine, trace=file), **options)
    assert isinstance(engine, TracedEngine)
    return engine


def steps_of(trace: Trace, output: RequestOutput, choice: int = 0) -> list[TraceStep]:
    return [step for step in trace.steps if (step.request_id, step.choice) == (output.request_id, choice)]


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "typical"])
@pytest.mark.parametrize("params", [
    SamplingParams(max_tokens=25, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=25, temperature=1.0, seed=3, n=3, repetition_penalty=1.2, logprobs=0),
], ids=["greedy", "choices"])  # fmt: skip
def test_a_trace_changes_nothing_and_tells_everything(path: Path, rule: str, params: SamplingParams) -> None:
    answer = [*PROMPT, *run(make_engine(), [PROMPT], params)[0].token_ids, 3, 4, 5]
    guess = oracle(answer, wrong_at=frozenset({len(PROMPT) + 6}), tree=rule == "coupled")
    (plain,) = run(make_engine(guess, rule=rule), [PROMPT], params)
    width = (
        9 if rule == "coupled" else 32
    )  # the prompt comes in chunks; drafts that are clipped change other rules' text
    (output,) = run(traced(path, guess, rule=rule, max_num_batched_tokens=width), [PROMPT], params)
    trace = read_trace(str(path))
    assert [request.prompt_token_ids for request in trace.requests.values()] == [tuple(PROMPT)]
    accepted = ended_within = 0
    for choice, expected in zip(output.outputs, plain.outputs, strict=True):
        own = steps_of(trace, output, choice.index)
        tokens = [token for step in own for token in step.tokens]
        assert tuple(token.token_id for token in tokens) == choice.token_ids
        assert tuple(token.origin for token in tokens) == choice.origins
        assert "".join(token.text for token in tokens) == TOKENIZER.decode(choice.token_ids, skip_special_tokens=False)
        assert own[-1].finish_reason == choice.finish_reason
        reported = [logprob for step in own for logprob in logprobs(step)]
        assert choice.logprobs is not None
        assert reported == pytest.approx([entry.logprob for entry in choice.logprobs], abs=2e-5)
        accepted += sum(len(step.path) for step in own)
        ended_within += sum(step.final is None for step in own if step.tokens)
        assert replace(choice, origins=()) == replace(expected, origins=())
    assert accepted - ended_within == output.metrics.num_accepted_tokens
    assert accepted > 0
    assert sum(len(step.nodes) for step in trace.steps) == output.metrics.num_draft_tokens
    prompt_steps = [step for step in steps_of(trace, output) if not step.tokens]
    assert [step.num_pending for step in prompt_steps] == ([9] if rule == "coupled" else [])


def logprobs(step: TraceStep) -> list[float | None]:
    path = [step.nodes[node].logprob for node in step.path]
    return path if step.final is None else [*path, step.final.logprob]


def test_the_samples_decide_what_is_accepted(path: Path) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=11, ignore_eos=True)
    answer = [*PROMPT, *run(make_engine(), [PROMPT], params)[0].token_ids, 3, 4, 5]
    (output,) = run(traced(path, oracle(answer, tree=True)), [PROMPT], params)
    steps = steps_of(read_trace(str(path)), output)
    assert any(len(step.path) > 1 for step in steps)
    for step in steps:
        above = (-1, *step.path)
        chosen = [step.samples[node + 1] for node in above]
        assert [sample.token_id for sample in chosen] == [token.token_id for token in step.tokens]
        assert chosen[-1] == step.final
        assert [step.nodes[node].text for node in step.path] == [sample.text for sample in chosen[:-1]]


def test_probabilities_are_the_models_own(path: Path) -> None:
    """A node's is what a pass over prompt and path alone says, whether the node is accepted or not."""
    params = SamplingParams(max_tokens=6, temperature=0.5, seed=1, ignore_eos=True, presence_penalty=1.0)
    engine = traced(path, lambda view: [2, 3], num_draft_tokens=2)
    (output,) = run(engine, [PROMPT], params)
    known = [*PROMPT, *output.token_ids]
    for step in steps_of(read_trace(str(path)), output):
        for parent, (node, token_id) in enumerate(zip(step.nodes, (2, 3), strict=False), -1):
            assert node.parent == parent
            text = [*known[: step.position], *(2,) * (parent + 1), token_id]
            judge = SamplingParams(max_tokens=1, prompt_logprobs=0)
            (judged,) = run(make_engine(), [text], judge)
            assert judged.prompt_logprobs is not None
            assert judged.prompt_logprobs[-1] is not None
            assert node.logprob == pytest.approx(judged.prompt_logprobs[-1].logprob, abs=2e-5)


def test_a_path_is_shown_up_to_the_stop_within_it(path: Path) -> None:
    answer = [*PROMPT, *run(make_engine(), [PROMPT], SamplingParams(max_tokens=20, ignore_eos=True))[0].token_ids]
    engine = traced(path, oracle(answer))
    stop = engine.tokenizer.decode([answer[len(PROMPT) + 3]])
    (output,) = run(engine, [PROMPT], SamplingParams(max_tokens=20, ignore_eos=True, stop=(stop,)))
    last = steps_of(read_trace(str(path)), output)[-1]
    assert last.finish_reason == "stop"
    assert last.final is last.kind is None
    assert len(last.path) == len(last.tokens) < len(last.nodes)
    assert [token.origin for token in last.tokens] == ["accepted"] * len(last.path)


@settings(
    derandomize=True, deadline=None, max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(any_setting(("none", "wrong", "tree", "mixed", "ngram")), arrivals(any_params()))
def test_traced_scenarios_write_what_plain_decoding_writes(tmp_path_factory, setting, plan: list[Arrival]) -> None:
    """Preemption, cancellation, chunks, choices: the outputs stay, and the file can be read."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    file = TraceFile(path)
    file.write(HEADER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_scenarios, "Engine", partial(TracedEngine, trace=file))
        scenario = Scenario(setting, plan, rule="coupled")
    scenario.run()
    scenario.check_end()
    scenario.check_equal_to_plain()
    trace = read_trace(str(path))
    for output in scenario.outputs.values():
        for choice in output.outputs:
            written = [t.token_id for step in steps_of(trace, output, choice.index) for t in step.tokens]
            assert tuple(written) == choice.token_ids


def test_lines_are_there_after_each_step(path: Path) -> None:
    engine = traced(path)
    engine.add_request(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
    for count in range(1, 6):
        engine.step()
        trace = read_trace(str(path))
        assert [step.step for step in trace.steps] == list(range(1, count + 1))
        assert not trace.truncated


def test_a_last_line_that_was_cut_off_is_left_out(path: Path) -> None:
    run(traced(path), [PROMPT], SamplingParams(max_tokens=4, ignore_eos=True))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    trace = read_trace(str(path))
    assert trace.truncated
    assert trace.steps == read_trace_of(path, whole).steps[:-1]


def read_trace_of(path: Path, data: bytes) -> Trace:
    path.write_bytes(data)
    return read_trace(str(path))


def test_what_is_no_trace_is_refused_by_line(path: Path) -> None:
    run(traced(path, lambda view: [2, 3]), [PROMPT], SamplingParams(max_tokens=4, ignore_eos=True))
    header, request, *steps = path.read_text().splitlines()
    value = json.loads(steps[1])
    damages: dict[str, Any] = {
        "nodes": [value["nodes"][0] | {"parent": 1}],
        "path": [7],
        "samples": value["samples"][:1],
        "final": None,
        "kind": "lucky",
        "step": "1",
        "milliseconds": {"draft": True},
        "tokens": 3,
        "more": 1,
    }
    for name, damage in damages.items():
        broken = json.dumps(value | {name: damage})
        with pytest.raises(ConfigError, match="line 3 is not a line of a trace"):
            read_trace_of(path, "\n".join([header, request, broken, ""]).encode())
    for line in ("", "3", "[]", "{}", '{"type": []}', "[" * 100_000, "9" * 5000, "\udcff"):
        with pytest.raises(ConfigError, match="line 2 is not a line of a trace"):
            read_trace_of(path, "\n".join([header, line, ""]).encode(errors="surrogateescape"))
    for data in (b"", b"{", header.encode(), f"{request}\n".encode(), b"\x00\xff\n"):
        with pytest.raises(ConfigError, match=r"not a trace|not a line of a trace"):
            read_trace_of(path, data)
    with pytest.raises(ConfigError, match="format 99"):
        read_trace_of(path, (json.dumps(json.loads(header) | {"format": 99}) + "\n").encode())
    with pytest.raises(ConfigError, match="steps of request '1', but not the request"):
        read_trace_of(path, f"{header}\n{steps[0]}\n".encode())
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(str(path.parent))


def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "such.jsonl", "a\0b", ""):
        with pytest.raises(ConfigError, match=r"trace file .* cannot be written"):
            LLM("no such model", trace=path)


def test_llm_writes_its_card_and_settings(tiny_llama: Path, path: Path) -> None:
    llm = LLM(str(tiny_llama), speculation="ngram", trace=path)
    plain = LLM(str(tiny_llama), speculation="ngram")
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.7, seed=2, logprobs=1)
    (output,), (expected,) = (one.generate("ab ab ab ab", params) for one in (llm, plain))
    assert output.outputs == expected.outputs
    trace = read_trace(str(path))
    assert trace.header.model == llm.model_card
    assert trace.header.settings["speculation"]["method"] == "ngram"
    assert trace.requests["1"].prompt == "ab ab ab ab"
    assert trace.requests["1"].seed == 2
    assert "".join(token.text for step in trace.steps for token in step.tokens) == llm.tokenizer.decode(
        list(output.token_ids), skip_special_tokens=False
    )


def test_an_abandoned_stream_leaves_whole_lines(tiny_llama: Path, path: Path) -> None:
    llm = LLM(str(tiny_llama), trace=path)
    stream = llm.stream("ab ab", SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(3):
        next(stream)
    stream.close()
    trace = read_trace(str(path))
    assert len(trace.steps) == 3
    assert not trace.truncated
