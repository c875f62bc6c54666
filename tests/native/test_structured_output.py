"""SmolLM2 under generated JSON schemas, native engine: what it finishes is valid, and is the same drafted or not."""

from __future__ import annotations

import json
from functools import cache

import jsonschema
import pytest

from paceline import LLM, EngineConfig, Grammar, RequestOutput, SamplingParams, SchedulerConfig
from schemas import schemas

CONFIG = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=8))


@cache
def prompts(llm: LLM, count: int) -> list[list[int]]:
    return [
        llm.tokenizer.encode_chat([{"role": "user", "content": f"Write JSON about a {subject}, number {i}."}])
        for i, subject in zip(range(count), ["person", "parcel", "shop", "song"] * count, strict=False)
    ]


def answers(llm: LLM, grammars: list[Grammar], temperature: float) -> list[RequestOutput]:
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=120, grammar=grammar)
        for i, grammar in enumerate(grammars)
    ]
    return llm.generate(prompts(llm, len(grammars)), params)


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_finished_outputs_are_valid_and_drafting_changes_nothing(smollm2, count: int) -> None:
    all_schemas = schemas(count)
    grammars = [Grammar.json_schema(schema) for schema in all_schemas]
    plain = LLM(smollm2, config=CONFIG, speculation="none")
    drafting = [LLM(smollm2, config=CONFIG, speculation=method) for method in ("ngram", "suffix+recycle")]
    num_finished = 0
    for temperature in (0.0, 0.8):
        outputs = answers(plain, grammars, temperature)
        for schema, output in zip(all_schemas, outputs, strict=True):
            assert output.outputs[0].finish_reason in ("stop", "length")
            if output.outputs[0].finish_reason == "stop":
                jsonschema.validate(json.loads(output.text), schema)
                num_finished += 1
        for llm in drafting:
            for own, other in zip(answers(llm, grammars, temperature), outputs, strict=True):
                assert own.token_ids == other.token_ids
                assert own.text == other.text
                assert own.outputs[0].finish_reason == other.outputs[0].finish_reason
    assert num_finished > 1.6 * count  # of two temperatures
    assert all(llm.engine.metrics.num_accepted_tokens > 4 * count for llm in drafting)
