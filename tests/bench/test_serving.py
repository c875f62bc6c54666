"""benchmarks/serving.py: a whole measurement of a live server, what is made of repeats, and the table in the docs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from live_server import TOKENIZER, serving, toy

ROOT = Path(__file__).parents[2]
PLAIN, PEER = "Paceline plain", "a peer"


@pytest.fixture
def runs(script: ModuleType) -> dict[str, list[dict[str, Any]]]:
    """Two repeats of a server, and the same as if a peer had been half as fast."""
    prompts = [TOKENIZER.encode(text) for text in ("ab", "abcabc", "xyz", "hello", "a b c", "12", "345", "6")]
    bodies = {
        n: [{"prompt": ids, "max_tokens": 12, "temperature": 0, "ignore_eos": True} for ids in prompts] for n in (1, 8)
    }
    long_ids = TOKENIZER.encode("a long text, " * 50)
    own = []
    for _ in range(2):
        with serving(toy()) as live:
            own.append(asyncio.run(script.measure(SimpleNamespace(port=live.port), bodies, long_ids, {})))
    slow = json.loads(json.dumps(own))
    for run in slow:
        for load in run["load"].values():
            load["tokens_per_second"] /= 2
    return {PLAIN: own, PEER: slow}


def test_a_whole_measurement(script, runs):
    first, second = (run["load"] for run in runs[PLAIN])
    for level in ("1", "8"):
        assert (first[level]["requests"], first[level]["tokens"]) == (8, 8 * 12)
        assert first[level]["texts"] == second["1"]["texts"]
    assert all(run["stall"]["longest_milliseconds"] >= run["stall"]["p95_milliseconds"] >= 0 for run in runs[PLAIN])


def test_nothing_waited_for_is_no_time(script):
    assert script.percentiles([]) == {"p50": 0.0, "p95": 0.0}


def test_ratios_and_texts_in_the_table(script, runs):
    runs[PEER][0]["load"]["8"]["texts"][0] = "another"
    systems = script.summarize(runs)
    assert systems[PEER]["load"]["8"]["same_text_as_plain"] == 15 / 16
    settings = {"max_tokens": 12, "repeats": 2, "long_prompt_tokens": 650, "decoders": 8, "chunk_tokens": 512}
    environment = {"cpu": "a CPU", "cores": 2, "memory_bytes": 1 << 30}
    table = script.render({"model": "toy", "settings": settings, "environment": environment, "systems": systems})
    row = next(line for line in table.splitlines() if line.startswith(f"| {PLAIN} |"))
    assert row.endswith("| 2.0x |")


def test_a_refused_request_says_why(script):
    with serving(toy()) as live, pytest.raises(RuntimeError, match=r"400.*temperature"):
        asyncio.run(script.complete(live.port, {"prompt": [1], "temperature": -1}))


def test_table_is_the_measured_one(script):
    import results_file

    results = results_file.read("serving-smollm2-135m")
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert results_file.paste(page, script.render(results), name="benchmark") == page
