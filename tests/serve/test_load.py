"""SmolLM2 under load: whatever the others do, a completed text is that of the same request run alone."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from live_server import Live, serving
from paceline import LLM
from paceline.config import CacheConfig, EngineConfig, SchedulerConfig
from paceline.serve.parameters import completion_params
from paceline.serve.protocol import CompletionRequest

pytest.importorskip("paceline._native", reason="the native engine is not built")

NUM_CLIENTS = 32
NUM_DISTINCT = 36  # requests
PROMPTS = (
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea, there lived",
    "List the numbers from one to twenty: one, two, three,",
    "The steps to bake bread: first," + " mix the flour, wait, and mix again," * 40,
    "1, 2, 3, " * 90,
)
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"guided_regex": r"[a-z]{3,12}( [a-z]{2,8}){2,5}\."},
    {"guided_choice": ["one", "one and two", "three"]},
    {"guided_json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
)
CONFIG = EngineConfig(
    engine="native",
    max_model_len=1024,
    cache=CacheConfig(kv_cache_memory=24 << 20),  # too little for all: some are preempted
    scheduler=SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=128),
)


def body_of(number: int) -> dict[str, Any]:
    rng = random.Random(number)
    body: dict[str, Any] = {
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": rng.randrange(1, 24),
        "temperature": rng.choice([0.0, 0.0, 0.8]),
        "seed": number,
        "n": rng.choice([1, 1, 1, 2]),
        "logprobs": rng.choice([None, None, 0]),
        "speculative": rng.choice([None, None, False, {"method": "suffix", "num_speculative_tokens": 3}]),
    }
    return body | (rng.choice(GRAMMARS) if rng.random() < 0.25 else {})


class Said(NamedTuple):
    """One choice of an answer."""

    text: str
    finish_reason: str
    num_tokens: int | None  # None = not listed


class Alone:
    """What each request says when it runs alone and undrafted."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.answer = cache(self._answer)

    def _answer(self, number: int) -> list[Said]:
        body = body_of(number)
        params = completion_params(CompletionRequest(**{**body, "speculative": False}))
        [output] = self._llm.generate([body["prompt"]], params)
        return [Said(choice.text, str(choice.finish_reason), len(choice.token_ids)) for choice in output.outputs]


@pytest.fixture(scope="module")
def alone(smollm2) -> Iterator[Alone]:
    with LLM(smollm2, config=CONFIG, speculation="none", progress=False) as llm:
        yield Alone(llm)


async def ask(client: httpx.AsyncClient, number: int, *, leave_after: int | None) -> tuple[list[Said], int] | None:
    """Sends a request, as a stream or whole: its choices, and the tokens of its usage. None = it left early."""
    body = body_of(number)
    if leave_after is None and number % 3 == 0:
        answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
        return said(body, answer["choices"]), answer["usage"]["completion_tokens"]
    pieces: list[dict[str, Any]] = []
    num_tokens = -1
    wants = {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body | wants) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if len(pieces) == leave_after:
                return None
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                pieces += event["choices"]
                num_tokens = event["usage"]["completion_tokens"] if event["usage"] else num_tokens
    return said(body, pieces), num_tokens


def said(body: dict[str, Any], pieces: list[dict[str, Any]]) -> list[Said]:
    """The pieces of each choice put together; tokens are counted where they are listed."""
    choices = []
    for index in range(body["n"]):
        own = [piece for piece in pieces if piece["index"] == index]
        [reason] = [piece["finish_reason"] for piece in own if piece["finish_reason"] is not None]
        listed = [token for piece in own if piece["logprobs"] for token in piece["logprobs"]["tokens"]]
        count = len(listed) if body["logprobs"] is not None else None
        choices.append(Said("".join(piece["text"] for piece in own), reason, count))
    return choices


async def load(live: Live, numbers: Iterator[int], alone: Alone) -> int:
    """NUM_CLIENTS clients send these requests, and check each answer. Returns how many were not cancelled."""
    rng = random.Random(7)
    answers: list[tuple[int, list[Said], int]] = []

    async def work(client: httpx.AsyncClient) -> None:
        for number in numbers:
            leave_after = rng.choice([None, None, None, None, 0, 1, 4])
            if (answer := await ask(client, number, leave_after=leave_after)) is not None:
                answers.append((number, *answer))

    async with httpx.AsyncClient(
        base_url=live.url, timeout=None, limits=httpx.Limits(max_connections=NUM_CLIENTS)
    ) as client:
        await asyncio.gather(*(work(client) for _ in range(NUM_CLIENTS)))
    for number, choices, num_tokens in answers:
        expected = alone.answer(number)
        if body_of(number)["logprobs"] is None:
            expected = [choice._replace(num_tokens=None) for choice in expected]
        assert choices == expected, body_of(number)
        assert num_tokens == sum(choice.num_tokens or 0 for choice in alone.answer(number)), body_of(number)
    return len(answers)


def serve_under_load(smollm2: Any, alone: Alone, rounds: list[int]) -> list[int]:
    """Rounds of so many requests each. Returns the memory that is resident after each, in bytes."""
    resident = []
    with (
        LLM(smollm2, config=CONFIG, speculation="suffix+recycle", step_details=True, progress=False) as llm,
        serving(llm.engine, drain_seconds=30.0) as live,  # which checks the cache at its end
    ):
        for count in rounds:
            numbers = (number % NUM_DISTINCT for number in range(count))
            completed = asyncio.run(load(live, numbers, alone))
            assert count // 3 < completed < count
            gc.collect()
            resident.append(resident_bytes())
        assert llm.engine.metrics.num_accepted_tokens > 0
        assert llm.engine.scheduler.num_preemptions > 0
    assert llm.engine.cache.num_free_blocks == llm.engine.cache.num_blocks
    return resident


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_32_clients_get_what_each_would_get_alone(smollm2, alone):
    serve_under_load(smollm2, alone, [72])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_2000_requests_leave_nothing_behind(smollm2, alone):
    resident = serve_under_load(smollm2, alone, [250] * 8)
    assert resident[-1] < 1.05 * resident[0], resident
