"""AsyncEngine: an engine on a thread of its own, and requests that come and go while it steps."""

from __future__ import annotations

import asyncio

from paceline.engine.async_engine import AsyncEngine
from paceline.types import SamplingParams
from toy_engine import PROMPT, make_engine, run


async def read(stream):
    return [delta async for delta in stream]


def test_streams_bring_what_the_engine_alone_writes() -> None:
    params = [SamplingParams(max_tokens=9 + k, temperature=0.8, seed=k, n=1 + k % 2, logprobs=1) for k in range(6)]
    plain = run(make_engine(), [PROMPT] * 6, params)

    async def main():
        engine = AsyncEngine(make_engine(lambda view: [2, 3, 4]))
        engine.start()
        streams = [await engine.submit(PROMPT, own) for own in params]
        deltas = await asyncio.gather(*map(read, streams))
        await engine.close()
        return deltas

    for deltas, alone in zip(asyncio.run(main()), plain, strict=True):
        output = deltas[-1].output
        assert output is not None
        for choice, expected in zip(output.outputs, alone.outputs, strict=True):
            own = [delta for delta in deltas if delta.index == choice.index]
            assert choice.token_ids == expected.token_ids == tuple(t for d in own for t in d.token_ids)
            assert "".join(d.text for d in own) == expected.text
            assert tuple(p for d in own for p in d.logprobs or ()) == expected.logprobs
            assert [d.finish_reason for d in own][-1] == expected.finish_reason
