"""Log-probabilities in OpenAI's two shapes: of chats, and of text completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.serve.vocabulary import Vocabulary
from paceline.types import TokenLogprob

_LEAST = -9999.0  # what OpenAI gives for a probability of zero: JSON has no -inf


def chat_logprobs(entries: Iterable[TokenLogprob], vocabulary: Vocabulary) -> dict[str, Any]:
    """Of a message, or of a piece of it: `content` has one entry a token."""
    return {"content": [_entry(entry, vocabulary) for entry in entries], "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprob | None], vocabulary: Vocabulary, *, first: Sequence[int], offset: int
) -> dict[str, Any]:
    """Of a text that begins at this offset: parallel lists. first: the ids of entries that are None."""
    unknown = iter(first)
    tokens, logprobs, tops, offsets = [], [], [], []
    for entry in entries:
        text = vocabulary.text(next(unknown) if entry is None else entry.token_id)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        logprobs.append(None if entry is None else _finite(entry.logprob))
        tops.append(None if entry is None else _top(entry, vocabulary))
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def _entry(entry: TokenLogprob, vocabulary: Vocabulary) -> dict[str, Any]:
    top = [_token(token_id, logprob, vocabulary) for token_id, logprob in entry.top]
    return {**_token(entry.token_id, entry.logprob, vocabulary), "top_logprobs": top}


def _token(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "token": vocabulary.text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(vocabulary.bytes(token_id)),
    }


def _top(entry: TokenLogprob, vocabulary: Vocabulary) -> dict[str, float]:
    """The likeliest tokens by their text, and the token itself; of two with the same text the likelier."""
    top: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        top.setdefault(vocabulary.text(token_id), _finite(logprob))
    return top


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
