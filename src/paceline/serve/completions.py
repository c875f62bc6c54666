"""POST /v1/completions: texts that go on from prompts."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from paceline.engine.request_stream import RequestStream
from paceline.serve.constraints import grammar_fields
from paceline.serve.details import chunk_metrics, response_metrics
from paceline.serve.disconnect import while_connected
from paceline.serve.errors import bad_field
from paceline.serve.generation import Prompt, collect, merged, submit
from paceline.serve.logprobs import completion_logprobs
from paceline.serve.parameters import completion_params
from paceline.serve.protocol import CompletionRequest
from paceline.serve.record import RequestRecord, record_of
from paceline.serve.service import Service, service_of
from paceline.serve.streaming import EventStream
from paceline.serve.usage import usage
from paceline.types import Completion, RequestOutput, TokenLogprob

router = APIRouter()


@router.post("/v1/completions")
async def completions(
    body: CompletionRequest, request: Request, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Completes one prompt or several; the choices of prompt i have the indices from i * n on."""
    service.check_model(body.model)
    if body.stream and body.echo and body.logprobs is not None:
        raise bad_field("echo", "log-probabilities of a prompt are not streamed: drop echo, logprobs or stream.")
    params = completion_params(body)
    prompts = await run_in_threadpool(partial(_prompts, service, body))
    head = {"id": f"cmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": service.model}
    head["object"] = "text_completion"
    record = record_of(request.scope)
    streams = await submit(
        service,
        prompts,
        params,
        priority=body.priority or 0,
        prompt_field="prompt",
        grammar_field=next(iter(grammar_fields(body)), None),
    )
    if body.stream:
        events = _events(service, body, head, prompts, streams, record)
        return EventStream(events, streams=streams, write_seconds=service.settings.write_seconds)
    outputs, deltas = await while_connected(request.receive, collect(streams))
    record.note(outputs)
    answer = {
        **head,
        "choices": [
            _choice(service, body, output, choice, len(output.outputs) * index + choice.index)
            for index, output in enumerate(outputs)
            for choice in output.outputs
        ],
        "usage": usage(outputs, scored_only=body.max_tokens == 0),
        **response_metrics(body.metrics, outputs, deltas),
    }
    return JSONResponse(answer)


def _prompts(service: Service, body: CompletionRequest) -> list[Prompt]:
    single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    prompts: list[Any] = [body.prompt] if single else list(body.prompt)
    return [(service.tokenizer.encode(text), text) if isinstance(text, str) else (text, None) for text in prompts]


def _choice(
    service: Service, body: CompletionRequest, output: RequestOutput, choice: Completion, index: int
) -> dict[str, Any]:
    text, entries = choice.text, choice.logprobs
    if body.max_tokens == 0:  # the prompt was to be scored: the token that came after it is dropped
        text, entries = "", () if entries is not None else None
    if body.echo:
        text = _prompt_text(service, output.prompt_token_ids, output.prompt) + text
    logprobs = None
    if entries is not None:
        known: tuple[TokenLogprob | None, ...] = (*(output.prompt_logprobs or ()), *entries)
        logprobs = completion_logprobs(known, service.vocabulary, first=output.prompt_token_ids, offset=0)
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": "length" if body.max_tokens == 0 else choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


async def _events(
    service: Service,
    body: CompletionRequest,
    head: dict[str, Any],
    prompts: list[Prompt],
    streams: list[RequestStream],
    record: RequestRecord,
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of streamed texts: for each choice its pieces, its prompt first if wanted; then the usage."""
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    num_choices = body.n or 1

    def chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**head, "choices": choices, **({"usage": None} if wants_usage else {}), **more}

    def piece(index: int, text: str, logprobs: Any = None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    offsets: dict[int, int] = {}  # of the next token's text, by choice
    if body.echo:
        for place, (token_ids, text) in enumerate(prompts):
            for index in range(place * num_choices, (place + 1) * num_choices):
                yield chunk([piece(index, _prompt_text(service, token_ids, text))])
    outputs: dict[int, RequestOutput] = {}
    async for place, delta in merged(streams):
        index = place * num_choices + delta.index
        logprobs = None
        if delta.logprobs:
            offset = offsets.get(index, 0)
            logprobs = completion_logprobs(delta.logprobs, service.vocabulary, first=(), offset=offset)
            offsets[index] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        metrics = chunk_metrics(body.metrics, delta)
        text = "" if body.max_tokens == 0 else delta.text
        if text or logprobs or metrics:
            yield chunk([piece(index, text, logprobs)], **metrics)
        if delta.output is not None:
            outputs[place] = delta.output
            record.note(list(outputs.values()))
        if delta.finish_reason is not None:
            reason = "length" if body.max_tokens == 0 else delta.finish_reason
            end = {**piece(index, ""), "finish_reason": reason, "stop_reason": delta.stop_reason}
            done = list(outputs.values()) if len(outputs) == len(prompts) else []
            yield chunk([end], **response_metrics(body.metrics, done, []))
    if wants_usage:
        yield chunk([], usage=usage(list(outputs.values()), scored_only=body.max_tokens == 0))


def _prompt_text(service: Service, token_ids: Sequence[int], text: str | None) -> str:
    return service.tokenizer.decode(list(token_ids)) if text is None else text
