"""/v1/completions through the real client: prompts as text and ids, batches, echo, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from live_server import TOKENIZER, toy
from paceline.params import SamplingParams
from paceline.types import RequestOutput
from toy_engine import run

TEXTS = ["ab ab ab", "cd cd c"]
IDS = [TOKENIZER.encode(text) for text in TEXTS]


def alone(params: SamplingParams, prompts: list[list[int]] = IDS) -> list[RequestOutput]:
    return run(toy(), prompts, params)


def complete(live: Any, **fields: Any) -> Any:
    return live.client().completions.create(model="toy", **fields)


def streamed(live: Any, **fields: Any) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in complete(live, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


@pytest.mark.parametrize(
    ("prompt", "count"), [(TEXTS[0], 1), (TEXTS, 2), (IDS[0], 1), (IDS, 2), ([TEXTS[0], IDS[1]], 2)]
)
@pytest.mark.parametrize("n", [1, 2])
def test_prompts(toy_server, prompt, count, n):
    fields = {"prompt": prompt, "seed": 5, "max_tokens": 20, "n": n}
    outputs = alone(SamplingParams(temperature=1.0, seed=5, max_tokens=20, n=n), IDS[:count])
    expected = [choice.text for output in outputs for choice in output.outputs]
    answer = complete(toy_server, **fields)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(count * n))
    assert answer.usage.prompt_tokens == sum(map(len, IDS[:count]))
    assert streamed(toy_server, **fields) == dict(enumerate(expected))


def test_sixteen_tokens_by_default(toy_server):
    answer = complete(toy_server, prompt=TEXTS[0], temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_echo(toy_server):
    fields = {"prompt": TEXTS, "temperature": 0, "max_tokens": 6, "echo": True}
    expected = [text + output.text for text, output in zip(TEXTS, alone(SamplingParams(max_tokens=6)), strict=True)]
    assert [choice.text for choice in complete(toy_server, **fields).choices] == expected
    assert streamed(toy_server, **fields) == dict(enumerate(expected))


def test_logprobs(toy_server):
    fields = {"prompt": TEXTS[0], "temperature": 0, "max_tokens": 8, "logprobs": 2}
    [output] = alone(SamplingParams(max_tokens=8, logprobs=2), IDS[:1])
    known = output.outputs[0].logprobs
    pieces = [chunk.choices[0].logprobs for chunk in complete(toy_server, stream=True, **fields)]
    streamed_pieces = [piece for piece in pieces if piece is not None]
    whole = complete(toy_server, **fields).choices[0].logprobs
    assert whole.token_logprobs == [pytest.approx(entry.logprob) for entry in known]
    assert whole.tokens == [TOKENIZER.token_text(i) for i in output.token_ids]
    assert whole.text_offset == list(range(len(whole.tokens)))
    assert [set(top) for top in whole.top_logprobs] == [
        {TOKENIZER.token_text(i) for i in (*(i for i, _ in entry.top), entry.token_id)} for entry in known
    ]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for piece in streamed_pieces for value in getattr(piece, name)] == getattr(whole, name)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_is_scored(toy_server, max_tokens):
    answer = complete(toy_server, prompt=TEXTS[0], temperature=0, max_tokens=max_tokens, echo=True, logprobs=1)
    [output] = alone(SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=1), IDS[:1])
    scores = answer.choices[0].logprobs
    expected = [*output.prompt_logprobs, *output.outputs[0].logprobs[:max_tokens]]
    assert scores.token_logprobs == [None if e is None else pytest.approx(e.logprob) for e in expected]
    assert scores.tokens == [TOKENIZER.token_text(i) for i in (*IDS[0], *output.token_ids[:max_tokens])]
    assert answer.choices[0].text == TEXTS[0] + output.text[:max_tokens]
    assert answer.usage.completion_tokens == max_tokens


def test_metrics_of_a_batch_are_summed(toy_server):
    fields = {"prompt": TEXTS, "temperature": 0, "max_tokens": 20, "seed": 1, "extra_body": {"metrics": "summary"}}
    outputs = alone(SamplingParams(max_tokens=20))
    answer = complete(toy_server, **fields)
    metrics = answer.model_extra["metrics"]
    assert len(metrics["seeds"]) == 2
    *_, last = complete(toy_server, stream=True, **fields)
    assert last.model_extra["metrics"] == metrics
    assert metrics["lossless"] is all(output.lossless for output in outputs)
