"""From a request's fields to SamplingParams: OpenAI's names and defaults on one side, the engine's on the other."""

from __future__ import annotations

from typing import Any

from paceline.errors import PromptError
from paceline.interfaces import Tokenizer
from paceline.params import Grammar, RequestSpeculation, SamplingParams
from paceline.serve.constraints import grammar_of
from paceline.serve.errors import bad_field
from paceline.serve.protocol import ChatRequest, CompletionRequest, Generation, Prediction

_SAME = (  # fields that SamplingParams knows under the same name, with the same default
    "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "n", "min_tokens", "ignore_eos",
    "skip_special_tokens",
)  # fmt: skip


def chat_params(
    request: ChatRequest, *, room: int, tokenizer: Tokenizer, call: Grammar | None, after: str | None
) -> SamplingParams:
    """Of a chat. room: tokens that the context has left, the default of max_tokens. call: the grammar of a forced tool
    call. after: the marker in the text after which a grammar begins."""
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_field("top_logprobs", "shows with logprobs only and would be ignored: set logprobs to true.")
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise bad_field("max_tokens", "the same as max_completion_tokens: give one of them.")
    own = grammar_of(request, after=after)
    if own is not None and call is not None:
        raise bad_field("tool_choice", "a forced call leaves no room for another format: drop one of the two.")
    limit = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    return _params(
        request,
        max_tokens=room if limit is None else limit,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        grammar=call or own,
        prediction=() if request.prediction is None else _prediction(request.prediction, tokenizer),
    )


def completion_params(request: CompletionRequest) -> SamplingParams:
    """Of a text completion: 16 tokens unless it says more, as OpenAI has it; 0 are for scoring an echoed prompt."""
    max_tokens = 16 if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and not request.echo:
        raise bad_field("max_tokens", "0 leaves nothing to answer without echo: set echo, or raise it.")
    return _params(
        request,
        max_tokens=max_tokens or 1,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
        grammar=grammar_of(request, after=None),
    )


def _params(request: Generation, **more: Any) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise bad_field("stream_options", "would be ignored without stream: set stream to true.")
    given = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=0 if request.top_k in (None, -1) else request.top_k,
        logit_bias=_logit_bias(request.logit_bias or {}),
        seed=None if request.seed is None else request.seed % 2**64,
        stop=tuple([request.stop] if isinstance(request.stop, str) else request.stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        speculation=True if request.speculative is None else RequestSpeculation.parse(request.speculative),
        step_details=request.metrics == "detailed",
        **given,
        **more,
    )


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    for token_id in bias:
        if not (token_id.isascii() and token_id.isdecimal() and len(token_id) < 10):
            raise bad_field("logit_bias", f"its names must be token ids; got {token_id!r:.40}: /tokenize tells them.")
    return {int(token_id): value for token_id, value in bias.items()}


def _prediction(prediction: Prediction, tokenizer: Tokenizer) -> tuple[int, ...]:
    text = prediction.content if isinstance(prediction.content, str) else text_of(prediction.content, "prediction")
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    except PromptError as error:
        raise bad_field("prediction", str(error)) from error


def text_of(parts: list[dict[str, Any]], field: str) -> str:
    """The text of content parts, one after another."""
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad_field(field, f"parts of the type text only; got {part!r:.80}: drop the others.")
    return "".join(part["text"] for part in parts)
