"""examples/ and docs/serving.md are true of the server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from live_server import serving
from paceline import LLM
from paceline.serve.protocol import ChatRequest, CompletionRequest, Message

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def smollm2_server(smollm2):
    with LLM(smollm2, speculation="ngram", step_details=True) as llm, serving(llm.engine) as live:
        yield live


def run(example: str, *arguments: str) -> str:
    command = [sys.executable, ROOT / "examples" / example, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_openais_client(smollm2_server):
    said = run("openai_client.py", f"{smollm2_server.url}/v1")
    found = re.fullmatch(
        r"answer: (.*)\ntokens a step: (.*)\nstreamed: (.*)\ntool call: get_weather (.*)\n", said, re.S
    )
    assert found[1] == found[3]
    assert float(found[2]) >= 1
    assert "city" in json.loads(found[4])


def test_langchains_client(smollm2_server):
    pytest.importorskip("langchain_openai")
    said = run("langchain_client.py", f"{smollm2_server.url}/v1", "toy")
    assert re.fullmatch(r"answer: .+\nstreamed: .+\n", said, re.S)


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, Message])
def test_the_page_has_every_field(model):
    named = set(re.findall(r"`(\w+)", PAGE))
    assert set(model.model_fields) - named - {"role", "name", "tool_calls", "tool_call_id"} == set()


def test_the_dashboard_shows_metrics_that_there_are():
    shown = set(re.findall(r"paceline:\w+", (ROOT / "examples" / "grafana.json").read_text(encoding="utf-8")))
    known = set(re.findall(r"`(paceline:\w+)", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")))
    assert {re.sub("_bucket$", "", name) for name in shown} - known == set()
