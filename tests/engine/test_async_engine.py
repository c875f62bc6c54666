"""AsyncEngine: an engine on a thread of its own, and requests that come and go while it steps."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace
from typing import Any

import pytest

from paceline.engine.async_engine import AsyncEngine
from paceline.engine.stats import FinishedRequest
from paceline.errors import (
    ConfigError,
    EngineClosedError,
    EngineStepError,
    PacelineWarning,
    PromptError,
    QueueFullError,
)
from paceline.interfaces import Drafter
from paceline.params import SamplingParams
from paceline.testing import ToyModel
from paceline.types import Delta, RequestOutput
from toy_engine import PROMPT, TOKENIZER, make_engine, oracle, run

LONG = SamplingParams(max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)


class Gate(ToyModel):
    """Each pass waits for its permit, so that a test knows what happened before it."""

    def __init__(self) -> None:
        super().__init__(
            vocab_size=TOKENIZER.vocab_size, seed=3, order=3, num_blocks=64, block_size=4, max_model_len=128
        )
        self.permits = threading.Semaphore(0)
        self.fails = False

    def forward(self, batch, sampling=None):
        self.permits.acquire()
        if self.fails:
            self.fails = False
            raise RuntimeError("the runner broke")
        return super().forward(batch, sampling)


async def read(stream) -> list[Delta]:
    return [delta async for delta in stream]


async def output_of(stream) -> RequestOutput:
    output = (await read(stream))[-1].output
    assert output is not None
    return output


def plain(params: SamplingParams) -> RequestOutput:
    return run(make_engine(), [PROMPT], params)[0]


def serve(scenario, engine=None, **options: Any) -> Any:
    """Runs an async function on a started AsyncEngine; afterwards all K/V blocks are free."""
    inner = engine or make_engine()

    async def main() -> Any:
        served = AsyncEngine(inner, **options)
        served.start()
        try:
            return await scenario(served)
        finally:
            await served.close()

    result = asyncio.run(asyncio.wait_for(main(), timeout=120))
    assert not inner.has_unfinished
    inner.check_integrity()
    assert inner.cache.num_free_blocks == inner.cache.num_blocks
    return result


def test_streams_bring_what_the_engine_alone_writes() -> None:
    all_params = [SamplingParams(max_tokens=9 + k, temperature=0.8, seed=k, n=1 + k % 2, logprobs=1) for k in range(6)]

    async def scenario(engine: AsyncEngine):
        streams = [await engine.submit(PROMPT, own, prompt="text") for own in all_params]
        return await asyncio.gather(*map(read, streams))

    for deltas, params in zip(serve(scenario, make_engine(lambda view: [2, 3, 4])), all_params, strict=True):
        output = deltas[-1].output
        assert output.prompt == "text"
        assert [delta.output for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        for choice, expected in zip(output.outputs, plain(params).outputs, strict=True):
            own = [delta for delta in deltas if delta.index == choice.index]
            assert choice.token_ids == expected.token_ids == tuple(t for d in own for t in d.token_ids)
            assert "".join(d.text for d in own) == expected.text
            assert tuple(p for d in own for p in d.logprobs) == expected.logprobs
            assert choice.origins == tuple(o for d in own for o in d.origins)
            assert [d.finish_reason for d in own] == [None] * (len(own) - 1) + [expected.finish_reason]


@pytest.mark.parametrize("drafting", [False, True])
def test_random_traffic_loses_and_changes_nothing(drafting: bool) -> None:
    """Requests that come in waves; some are cancelled in mid-stream, some have a deadline that is over at once."""
    rng = random.Random(7)
    inner = make_engine((lambda view: [2, 3, 4]) if drafting else None, max_num_seqs=3)

    async def one(engine: AsyncEngine, number: int) -> None:
        params = SamplingParams(
            max_tokens=rng.randrange(1, 30),
            temperature=rng.choice([0.0, 0.9]),
            seed=number,
            n=rng.choice([1, 1, 3]),
            speculation=rng.random() < 0.8,
        )
        kind = rng.choice(["whole", "whole", "whole", "closed", "cancelled", "overdue"])
        deadline = 1e-9 if kind == "overdue" else None
        stream = await engine.submit(PROMPT, params, priority=rng.randrange(3), deadline_seconds=deadline)
        if kind == "closed":
            async for _ in stream:
                break
            await stream.aclose()
            assert await read(stream) == []
        elif kind == "cancelled":
            task = asyncio.create_task(read(stream))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif kind == "overdue":
            output = await output_of(stream)
            assert {choice.stop_reason for choice in output.outputs} == {"deadline"}
        else:
            output, alone = await output_of(stream), plain(params)
            assert [choice.token_ids for choice in output.outputs] == [choice.token_ids for choice in alone.outputs]
            assert output.text == alone.text

    async def scenario(engine: AsyncEngine) -> None:
        for wave in range(4):
            await asyncio.gather(*(one(engine, 20 * wave + number) for number in range(20)))

    serve(scenario, inner)


def test_a_slow_reader_gets_what_came_meanwhile_as_one_delta() -> None:
    async def scenario(engine: AsyncEngine):
        slow = await engine.submit(PROMPT, replace(LONG, max_tokens=30, n=2, seed=1, temperature=1.0, logprobs=0))
        await output_of(await engine.submit(PROMPT, replace(LONG, max_tokens=80)))
        return await read(slow)

    deltas = serve(scenario)
    assert [delta.index for delta in deltas] == [0, 1]
    output = deltas[-1].output
    for delta, choice in zip(deltas, output.outputs, strict=True):
        assert (delta.token_ids, delta.text, delta.origins, delta.logprobs, delta.finish_reason) == (
            choice.token_ids, choice.text, choice.origins, choice.logprobs, choice.finish_reason,
        )  # fmt: skip


def test_more_requests_than_may_wait_are_refused_with_a_time_to_come_back() -> None:
    async def main() -> None:
        engine = AsyncEngine(make_engine(), max_waiting=3)  # not started: all wait
        streams = [await engine.submit(PROMPT, SHORT) for _ in range(3)]
        with pytest.raises(QueueFullError, match="3 requests wait already") as refused:
            await engine.submit(PROMPT, SHORT)
        assert refused.value.retry_after_seconds == 1  # nothing is known yet
        engine.start()
        for stream in streams:
            await output_of(stream)
        await output_of(await engine.submit(PROMPT, SHORT))
        await engine.close()

    asyncio.run(main())


def test_requests_that_are_being_prepared_count_as_waiting() -> None:
    async def main() -> list[object]:
        engine = AsyncEngine(make_engine(), max_waiting=2)
        results = await asyncio.gather(*(engine.submit(PROMPT, SHORT) for _ in range(5)), return_exceptions=True)
        await engine.close()
        return [type(result) for result in results if isinstance(result, Exception)]

    assert asyncio.run(main()) == [QueueFullError] * 3


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"token_ids": []}, PromptError, "is empty"),
        ({"params": SamplingParams(stop_token_ids=(999,))}, ConfigError, "outside the vocabulary"),
        ({"priority": 0.5}, ConfigError, "priority must be an integer"),
        ({"deadline_seconds": 0}, ConfigError, "deadline_seconds must be a number above 0"),
        ({"deadline_seconds": float("nan")}, ConfigError, "deadline_seconds must be a number above 0"),
    ],
)
def test_requests_that_cannot_run_are_refused_at_once(request_, error, message) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        with pytest.raises(error, match=message):
            await engine.submit(**{"token_ids": PROMPT, "params": SHORT, **request_})

    serve(scenario)


def test_a_deadline_brings_what_there_is() -> None:
    async def scenario(engine: AsyncEngine):
        stream = await engine.submit(PROMPT, LONG, deadline_seconds=1e6)
        first = await anext(stream)
        stream.request.deadline = 0.0
        return [first, *await read(stream)]

    deltas = serve(scenario)
    (choice,) = deltas[-1].output.outputs
    assert (choice.finish_reason, choice.stop_reason) == ("abort", "deadline")
    assert 0 < len(choice.token_ids) < 100
    assert choice.token_ids == plain(LONG).token_ids[: len(choice.token_ids)]
    assert choice.token_ids == tuple(t for delta in deltas for t in delta.token_ids)


def test_a_failed_step_fails_its_requests_and_no_others() -> None:
    gate = Gate()

    async def scenario(engine: AsyncEngine):
        first = await engine.submit(PROMPT, LONG)
        gate.permits.release()
        await anext(first)
        gate.fails = True
        gate.permits.release()
        with pytest.raises(EngineStepError, match=r"a step failed \(RuntimeError: the runner broke\)") as failed:
            await read(first)
        assert isinstance(failed.value.__cause__, RuntimeError)
        assert await read(first) == []
        second = await engine.submit(PROMPT, LONG)
        gate.permits.release(200)
        assert (await output_of(second)).token_ids == plain(LONG).token_ids
        assert engine.alive
        return engine.stats()

    stats = serve(scenario, make_engine(runner=gate))
    assert stats.finished == {"error": 1, "length": 1}


def test_a_drafter_that_fails_costs_no_request() -> None:
    class Failing(Drafter):
        name = "failing"

        def propose(self, views, budgets):
            raise RuntimeError("no draft today")

    async def scenario(engine: AsyncEngine):
        output = await output_of(await engine.submit(PROMPT, LONG))
        return output, engine.stats()

    inner = make_engine(drafter=Failing())
    with pytest.warns(PacelineWarning, match="no draft today"):
        output, stats = serve(scenario, inner)
    assert inner.drafting is not None
    assert not inner.drafting.skip_errors, "whoever has the engine afterwards sees the errors"
    assert output.token_ids == plain(LONG).token_ids
    assert stats.num_drafter_errors > 90


def test_closing_lets_requests_finish() -> None:
    async def main():
        engine = AsyncEngine(make_engine())
        engine.start()
        streams = [await engine.submit(PROMPT, replace(LONG, max_tokens=20 + k)) for k in range(12)]
        closing = asyncio.create_task(engine.close())
        outputs = [await output_of(stream) for stream in streams]
        await closing
        with pytest.raises(EngineClosedError, match="takes no more requests"):
            await engine.submit(PROMPT, SHORT)
        assert not engine.alive
        await engine.close()
        return outputs

    for k, output in enumerate(asyncio.run(main())):
        assert output.token_ids == plain(replace(LONG, max_tokens=20 + k)).token_ids


def test_what_is_not_finished_in_time_ends_with_what_it_has() -> None:
    gate = Gate()

    async def main():
        engine = AsyncEngine(make_engine(runner=gate))
        engine.start()
        streams = [await engine.submit(PROMPT, LONG) for _ in range(2)]
        gate.permits.release(1)
        first = await anext(streams[0])
        closing = asyncio.create_task(engine.close())
        again = asyncio.create_task(engine.close(drain_seconds=0))  # the shorter time holds
        await asyncio.sleep(0)
        gate.permits.release(1)
        outputs = [await output_of(stream) for stream in streams]
        await asyncio.gather(closing, again)
        return first, outputs

    first, outputs = asyncio.run(main())
    for output in outputs:
        (choice,) = output.outputs
        assert (choice.finish_reason, choice.stop_reason) == ("abort", "shutdown")
        assert choice.token_ids == plain(LONG).token_ids[: len(choice.token_ids)]
        assert len(choice.token_ids) <= 2  # the passes that had a permit
    assert first.token_ids == plain(LONG).token_ids[:1]


def test_an_engine_that_was_never_started_ends_its_requests_when_closed() -> None:
    async def main():
        engine = AsyncEngine(make_engine())
        streams = [await engine.submit(PROMPT, SHORT) for _ in range(2)]
        await engine.close()
        await AsyncEngine(make_engine()).close()
        return [await output_of(stream) for stream in streams]

    for output in asyncio.run(main()):
        assert [(c.finish_reason, c.token_ids) for c in output.outputs] == [("abort", ())]


def test_a_loop_that_is_gone_leaves_nothing_behind_and_another_may_come() -> None:
    gate = Gate()
    inner = make_engine(runner=gate)
    engine = AsyncEngine(inner)
    engine.start()

    async def leave() -> None:
        await engine.submit(PROMPT, LONG)

    async def come() -> RequestOutput:
        output = await output_of(await engine.submit(PROMPT, SHORT))
        assert list(inner.requests) == []
        await engine.close()
        return output

    asyncio.run(leave())
    gate.permits.release(500)
    assert asyncio.run(come()).token_ids == plain(SHORT).token_ids


def test_requests_of_a_loop_that_is_gone_take_no_place_in_the_queue() -> None:
    inner = make_engine()
    engine = AsyncEngine(inner, max_waiting=1)

    async def leave() -> None:
        await engine.submit(PROMPT, LONG)

    async def come() -> RequestOutput:
        stream = await engine.submit(PROMPT, SHORT)
        engine.start()
        output = await output_of(stream)
        assert list(inner.requests) == []
        await engine.close()
        return output

    asyncio.run(leave())
    assert asyncio.run(come()).token_ids == plain(SHORT).token_ids


def test_a_thread_that_dies_fails_what_was_there_and_refuses_what_comes(monkeypatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    inner = make_engine()

    async def main() -> None:
        engine = AsyncEngine(inner)
        stream = await engine.submit(PROMPT, SHORT)
        inner.abort_overdue = lambda: 1 / 0  # type: ignore[method-assign]
        engine.start()
        with pytest.raises(EngineStepError, match="ZeroDivisionError"):
            await read(stream)
        with pytest.raises(EngineClosedError):
            await engine.submit(PROMPT, SHORT)
        assert not engine.alive
        await engine.close()

    asyncio.run(main())
    assert not inner.has_unfinished
    assert inner.cache.num_free_blocks == inner.cache.num_blocks


def test_stats_and_records_add_up() -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, n=2, seed=1)
    answer = [*PROMPT, *plain(params).token_ids]
    records: list[FinishedRequest] = []

    async def scenario(engine: AsyncEngine):
        outputs = [await output_of(await engine.submit(PROMPT, params)) for _ in range(3)]
        stream = await engine.submit(PROMPT, LONG)
        await stream.aclose()
        await all_ended.wait()
        return outputs, engine.stats()

    all_ended = asyncio.Event()

    def observe(record: FinishedRequest) -> None:
        records.append(record)
        if len(records) == 4:
            all_ended.set()

    outputs, stats = serve(scenario, make_engine(oracle(answer)), observer=observe)
    num_begun = sum(record.queue_seconds is not None for record in records)
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert stats.finished == {"length": 6, "abort": 1}
    assert stats.num_generation_tokens == sum(record.num_generation_tokens for record in records)
    assert stats.num_prompt_tokens == len(PROMPT) * sum(record.num_generation_tokens > 0 for record in records)
    assert stats.num_prefix_cache_queries == num_begun * len(PROMPT)
    assert stats.num_prefix_cache_hits == (num_begun - 1) * ((len(PROMPT) - 1) // 4 * 4)
    assert stats.speculation.num_drafts >= sum(output.metrics.num_drafts for output in outputs) > 0
    for record, output in zip(records, outputs, strict=False):
        assert record.output == output
        assert (record.num_prompt_tokens, record.num_generation_tokens) == (len(PROMPT), 24)
        assert record.queue_seconds is not None
        assert record.first_token_seconds is not None
        assert 0 <= record.queue_seconds <= record.first_token_seconds <= record.seconds
        assert sum(count for count, _ in record.inter_token_seconds) == 24 - 2  # each choice's first is no gap
        assert max(count for count, _ in record.inter_token_seconds) == 5
