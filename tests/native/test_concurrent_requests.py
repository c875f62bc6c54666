"""Many requests at once on a real model: what is not cancelled reads as if it had been alone."""

from __future__ import annotations

import asyncio
import random

from paceline import LLM, SamplingParams
from paceline.config import CacheConfig, EngineConfig, SchedulerConfig
from paceline.engine.async_engine import AsyncEngine
from paceline.types import RequestOutput

PROMPTS = (
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea, there lived",
    "List the numbers from one to twenty: one, two, three,",
    "The five steps to bake bread are as follows. First," + " mix the flour," * 40,
)


def params_of(number: int) -> SamplingParams:
    rng = random.Random(number)
    return SamplingParams(
        max_tokens=rng.randrange(4, 24),
        temperature=rng.choice([0.0, 0.0, 0.8]),
        seed=number,
        n=rng.choice([1, 1, 1, 2]),
        speculation=rng.random() < 0.7,
    )


def test_32_requests_some_cancelled_read_as_if_each_were_alone(smollm2) -> None:
    config = EngineConfig(
        engine="native",
        max_model_len=256,
        cache=CacheConfig(kv_cache_memory=6 << 20),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )
    rng = random.Random(1)
    outputs: dict[int, RequestOutput] = {}

    async def one(engine: AsyncEngine, number: int, token_ids: list[int]) -> None:
        stream = await engine.submit(token_ids, params_of(number), priority=number % 3 // 2)
        cancel_after = rng.choice([None, None, None, 0, 2, 5])
        if cancel_after == 0:
            await stream.aclose()
        num_deltas = 0
        async for delta in stream:
            num_deltas += 1
            if delta.output is not None:
                outputs[number] = delta.output
            elif num_deltas == cancel_after:
                await stream.aclose()

    with LLM(smollm2, config=config, speculation="suffix+recycle", progress=False) as llm:
        encoded = [llm.tokenizer.encode(PROMPTS[number % len(PROMPTS)]) for number in range(32)]

        async def main() -> None:
            engine = AsyncEngine(llm.engine)
            engine.start()
            await asyncio.gather(*(one(engine, number, token_ids) for number, token_ids in enumerate(encoded)))
            await engine.close()

        asyncio.run(main())
        llm.engine.check_integrity()
        assert llm.engine.cache.num_free_blocks == llm.engine.cache.num_blocks
        assert llm.engine.metrics.num_accepted_tokens > 0
        assert llm.engine.scheduler.num_preemptions > 0
    assert 12 < len(outputs) < 32
    with LLM(smollm2, config=config, progress=False) as plain:
        for number, output in outputs.items():
            (alone,) = plain.generate([encoded[number]], params_of(number))
            assert [c.token_ids for c in output.outputs] == [c.token_ids for c in alone.outputs]
            assert [c.text for c in output.outputs] == [c.text for c in alone.outputs]
