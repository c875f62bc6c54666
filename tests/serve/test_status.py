"""/v1/models, /health, /metrics, /tokenize and /detokenize, and what the log says."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from live_server import TOKENIZER, serving, toy
from paceline.draft.ngram import NgramDrafter
from paceline.serve.record import RequestRecord

GLOSSARY = Path(__file__).parents[2] / "docs" / "glossary.md"


@pytest.fixture
def busy():
    """A server after a request of each route."""
    with serving(toy(drafter=NgramDrafter(max_ngram=2, min_ngram=1)), log_requests=True) as live:
        client = live.client()
        answers = [
            client.completions.create(model="toy", prompt="ab ab ab", n=2, temperature=0, max_tokens=40),
            client.completions.create(model="toy", prompt="ab ab ab", temperature=0, max_tokens=4),
        ]
        live.get("/v1/nothing")
        yield live, answers


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_metrics_count_what_the_clients_saw(busy):
    live, answers = busy
    text = live.get("/metrics").text
    found = samples(text)
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    prompts = sum(answer.usage.prompt_tokens for answer in answers)
    assert found["paceline:generation_tokens_total"] == tokens
    assert found["paceline:prompt_tokens_total"] == prompts
    assert found["paceline:time_to_first_token_seconds_count"] == 2
    assert (
        found["paceline:inter_token_latency_seconds_count"] == tokens - 3
    )  # each choice's first has nothing before it
    assert found["paceline:e2e_request_latency_seconds_count"] == 2
    assert found["paceline:request_queue_time_seconds_count"] == 2
    assert found["paceline:request_success_total{finished_reason=length}"] == 3
    assert found["paceline:num_requests_running"] == found["paceline:num_requests_waiting"] == 0
    assert found["paceline:http_requests_total{path=/v1/completions,status=200}"] == 2
    assert found["paceline:prefix_cache_hits_total"] == 8
    metrics = live.engine.metrics
    assert found["paceline:spec_decode_num_drafts_total"] == metrics.num_drafts > 0
    assert found["paceline:spec_decode_num_accepted_tokens_total"] == metrics.num_accepted_tokens > 0
    per_position = [v for k, v in found.items() if "accepted_tokens_per_pos_total" in k]
    assert per_position == list(metrics.num_accepted_tokens_per_pos)
    assert found["paceline:spec_decode_num_draft_tokens_per_drafter_total{drafter=ngram}"] == metrics.num_draft_tokens


def test_the_glossary_has_every_metric(busy):
    live, _ = busy
    names = {name for name in re.findall(r"^# TYPE (\S+) ", live.get("/metrics").text, re.M) if "_created" not in name}
    known = set(re.findall(r"`(paceline:\w+)", GLOSSARY.read_text(encoding="utf-8")))
    assert names - known == set()


def test_models(toy_server):
    [model] = toy_server.client().models.list().data
    assert (model.id, model.owned_by, model.model_extra["max_model_len"]) == ("toy", "paceline", 1024)
    assert toy_server.client().models.retrieve("toy") == model


def test_names_with_slashes():
    with serving(toy(), model_names=("org/model", "short")) as live:
        assert [model.id for model in live.client().models.list()] == ["org/model", "short"]
        assert live.client().models.retrieve("org/model").id == "org/model"
        answer = live.client().completions.create(model="short", prompt="a", max_tokens=1)
        assert answer.model == "org/model"


def test_health(toy_server):
    assert toy_server.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("special", [True, False])
def test_tokens_of_a_prompt(toy_server, special):
    body = {"prompt": "ab", "add_special_tokens": special, "return_token_strs": True}
    answer = toy_server.post("/tokenize", json=body).json()
    expected = TOKENIZER.encode("ab", add_special_tokens=special)
    assert answer["tokens"] == expected
    assert answer["count"] == len(expected)
    assert answer["token_strs"] == [TOKENIZER.token_text(i) for i in expected]
    text = toy_server.post("/detokenize", json={"tokens": expected}).json()["prompt"]
    assert text == ("<bos>" if special else "") + "ab"


def test_tokens_of_a_conversation(toy_server):
    body = {"messages": [{"role": "user", "content": "ab"}]}
    expected = TOKENIZER.encode("user: ab\nassistant: ", add_special_tokens=False)
    assert toy_server.post("/tokenize", json=body).json()["tokens"] == expected


def test_the_log(caplog):
    with caplog.at_level(logging.INFO, logger="paceline.serve"), serving(toy(), log_requests=True) as live:
        live.client().completions.create(model="toy", prompt="ab", temperature=0, max_tokens=4)
        live.get("/v1/nothing")
    lines = sorted(record.getMessage() for record in caplog.records if record.name == "paceline.serve")
    assert re.fullmatch(r"GET /v1/nothing 404, \d+ ms", lines[0])
    assert re.fullmatch(r"POST /v1/completions 200 3\+4 tokens, acceptance length 1\.00, length, \d+ ms", lines[1])
    assert len(lines) == 2


def test_the_log_says_when_a_client_left():
    record = RequestRecord("POST", "/v1/completions", status=200)
    assert "left" not in record.line()
    record.left = True
    assert record.line().startswith("POST /v1/completions 200, client left, ")
