"""Runs the prompts of one HTTP request on the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from paceline.engine.request_stream import RequestStream
from paceline.errors import GrammarError, PromptError
from paceline.params import SamplingParams
from paceline.serve.errors import ApiError, bad_field
from paceline.serve.protocol import MAX_CHOICES
from paceline.serve.service import Service
from paceline.types import Delta, RequestOutput

Prompt = tuple[list[int], str | None]  # token ids, and the text that they are of


async def submit(
    service: Service,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    priority: int,
    prompt_field: str,
    grammar_field: str | None,
) -> list[RequestStream]:
    """A stream for each prompt. Raises as AsyncEngine.submit does, and ApiError where one of the two fields of the
    request is at fault; then none of them runs."""
    if len(prompts) * params.n > MAX_CHOICES:
        raise bad_field(
            prompt_field, f"{len(prompts)} prompts with n = {params.n} are over {MAX_CHOICES} choices: send them apart."
        )
    streams: list[RequestStream] = []
    try:
        for token_ids, text in prompts:
            streams.append(
                await service.engine.submit(
                    token_ids,
                    params,
                    prompt=text,
                    priority=priority,
                    deadline_seconds=service.settings.request_seconds,
                )
            )
    except BaseException as error:
        await close(streams)
        if isinstance(error, PromptError):
            raise ApiError(400, str(error), param=prompt_field) from error
        if isinstance(error, GrammarError):
            raise ApiError(400, str(error), param=grammar_field) from error
        raise
    return streams


async def close(streams: Sequence[RequestStream]) -> None:
    """Cancels what still runs."""
    for stream in streams:
        await stream.aclose()


async def collect(streams: Sequence[RequestStream]) -> tuple[list[RequestOutput], list[Delta]]:
    """The outputs, in the order of the prompts, and the deltas of all."""
    outputs: list[RequestOutput | None] = [None] * len(streams)
    deltas: list[Delta] = []
    async with aclosing(merged(streams)) as pairs:
        async for index, delta in pairs:
            outputs[index] = delta.output or outputs[index]
            deltas.append(delta)
    return [output for output in outputs if output is not None], deltas


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas of all streams as they come, each with its prompt's index; closing it closes them.

    Nothing is taken from a stream before the last delta was: what waits is merged in the engine, and stays small.
    """
    try:
        if len(streams) == 1:
            async for delta in streams[0]:
                yield 0, delta
            return
        waiting = {asyncio.ensure_future(anext(stream, None)): i for i, stream in enumerate(streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=waiting.__getitem__):
                    index = waiting.pop(task)
                    delta = task.result()
                    if delta is not None:
                        yield index, delta
                        waiting[asyncio.ensure_future(anext(streams[index], None))] = index
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
    finally:
        await close(streams)
