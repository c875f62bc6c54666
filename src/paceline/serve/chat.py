"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from paceline.engine.request_stream import RequestStream
from paceline.params import SamplingParams
from paceline.serve import conversation
from paceline.serve.answer import AnswerFormat, message
from paceline.serve.constraints import call_grammar, grammar_fields
from paceline.serve.details import chunk_metrics, response_metrics
from paceline.serve.disconnect import while_connected
from paceline.serve.generation import Prompt, collect, merged, submit
from paceline.serve.logprobs import chat_logprobs
from paceline.serve.parameters import chat_params
from paceline.serve.protocol import ChatRequest
from paceline.serve.record import RequestRecord, record_of
from paceline.serve.service import Service, service_of
from paceline.serve.streaming import EventStream
from paceline.serve.usage import usage
from paceline.types import Completion, RequestOutput

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(
    body: ChatRequest, request: Request, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Answers a conversation."""
    service.check_model(body.model)
    prompt, params, form = await run_in_threadpool(partial(_prepare, service, body))
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": service.model}
    record = record_of(request.scope)
    streams = await submit(
        service,
        [prompt],
        params,
        priority=body.priority or 0,
        prompt_field="messages",
        grammar_field=next(iter(grammar_fields(body)), "tools"),
    )
    if body.stream:
        events = _events(service, body, head, form, streams, record)
        return EventStream(events, streams=streams, write_seconds=service.settings.write_seconds)
    outputs, deltas = await while_connected(request.receive, collect(streams))
    record.note(outputs)
    answer = {
        **head,
        "object": "chat.completion",
        "choices": [_choice(service, choice, form) for choice in outputs[0].outputs],
        "usage": usage(outputs),
        **response_metrics(body.metrics, outputs, deltas),
    }
    return JSONResponse(answer)


def _prepare(service: Service, body: ChatRequest) -> tuple[Prompt, SamplingParams, AnswerFormat]:
    tools = conversation.usable_tools(body)
    forced = conversation.forced_calls(body)
    text = conversation.render(body.messages, service.tokenizer, tools=tools, variables=body.chat_template_kwargs or {})
    token_ids = service.tokenizer.encode(text, add_special_tokens=False)
    after = conversation.grammar_marker(text, service.tokenizer)
    params = chat_params(
        body,
        room=max(1, service.max_model_len - len(token_ids)),
        tokenizer=service.tokenizer,
        call=call_grammar(forced, after=after) if forced else None,
        after=after,
    )
    return (token_ids, text), params, conversation.answer_format(text, service.tokenizer, tools)


def _choice(service: Service, choice: Completion, form: AnswerFormat) -> dict[str, Any]:
    whole = message(form, choice.text)
    return {
        "index": choice.index,
        "message": whole,
        "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs, service.vocabulary),
        "finish_reason": _finish_reason(choice.finish_reason, called="tool_calls" in whole),
        "stop_reason": choice.stop_reason,
    }


async def _events(
    service: Service,
    body: ChatRequest,
    head: dict[str, Any],
    form: AnswerFormat,
    streams: list[RequestStream],
    record: RequestRecord,
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a streamed answer: for each choice its role, its pieces and its end; then the usage, if wanted."""
    wants_usage = body.stream_options is not None and body.stream_options.include_usage

    def chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        nothing = {"usage": None} if wants_usage else {}
        return {**head, "object": "chat.completion.chunk", "choices": choices, **nothing, **more}

    def piece(index: int, delta: dict[str, Any], logprobs: Any = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    parsers = [form.parser() for _ in range(body.n or 1)]
    for index in range(len(parsers)):
        yield chunk([piece(index, {"role": "assistant", "content": ""})])
    outputs: list[RequestOutput] = []
    async for _, delta in merged(streams):
        parser, ends = parsers[delta.index], delta.finish_reason is not None
        fields = parser.feed(delta.text, last=ends)
        logprobs = chat_logprobs(delta.logprobs, service.vocabulary) if delta.logprobs else None
        metrics = chunk_metrics(body.metrics, delta)
        if fields or logprobs or metrics:
            yield chunk([piece(delta.index, fields, logprobs)], **metrics)
        if delta.output is not None:
            outputs.append(delta.output)
            record.note(outputs)
        if ends:
            end = {
                **piece(delta.index, {}),
                "finish_reason": _finish_reason(delta.finish_reason, called=parser.has_calls),
                "stop_reason": delta.stop_reason,
            }
            yield chunk([end], **response_metrics(body.metrics, outputs, []))
    if wants_usage:
        yield chunk([], usage=usage(outputs))


def _finish_reason(reason: str | None, *, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason
