"""POST /tokenize and /detokenize: what the model reads, in the shapes of vLLM."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.concurrency import run_in_threadpool

from paceline.serve.conversation import render
from paceline.serve.errors import ApiError, bad_field
from paceline.serve.protocol import DetokenizeRequest, TokenizeRequest
from paceline.serve.service import Service, service_of

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    """The token ids of a prompt, or of a conversation as the model's chat template renders it."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: give either prompt or messages.", param="prompt")
    token_ids = await run_in_threadpool(partial(_encode, service, body))
    answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": service.max_model_len, "tokens": token_ids}
    if body.return_token_strs:
        answer["token_strs"] = [service.vocabulary.text(token_id) for token_id in token_ids]
    return answer


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, service: Annotated[Service, Depends(service_of)]) -> dict[str, Any]:
    """The text of token ids, special tokens included."""
    service.check_model(body.model)
    beyond = next((token_id for token_id in body.tokens if token_id >= service.vocab_size), None)
    if beyond is not None:
        raise bad_field("tokens", f"token id {beyond} is outside the vocabulary of {service.vocab_size}: drop it.")
    decode = partial(service.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return {"prompt": await run_in_threadpool(decode)}


def _encode(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        return service.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
    text = render(body.messages, service.tokenizer, tools=[], variables={})
    return service.tokenizer.encode(text, add_special_tokens=False)
