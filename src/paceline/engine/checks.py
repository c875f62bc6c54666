"""What an engine refuses before a request is queued."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.errors import ConfigError, GrammarError, PromptError
from paceline.params import SamplingParams
from paceline.sampling.grammar import CompiledGrammar
from paceline.sampling.grammar_state import GrammarState


def check_prompt(prompt_token_ids: Sequence[int] | np.ndarray, *, vocab_size: int, max_model_len: int) -> None:
    """Raises PromptError for a prompt that is empty, beyond the context or holds unknown token ids."""
    length = len(prompt_token_ids)
    if length == 0:
        raise PromptError("the prompt is empty: give at least one token.")
    if length >= max_model_len:
        raise PromptError(
            f"the prompt has {length} tokens, but a sequence may hold {max_model_len} with at least one of output: "
            "shorten it, or raise max_model_len or kv_cache_memory if the model allows more."
        )
    for token_id in (min(prompt_token_ids), max(prompt_token_ids)):
        if not 0 <= token_id < vocab_size:
            raise PromptError(
                f"token id {token_id} is outside the vocabulary of {vocab_size}: take this model's tokenizer."
            )


def check_tokens(params: SamplingParams, *, vocab_size: int, eos_ids: frozenset[int]) -> None:
    """Raises ConfigError for parameters that name tokens outside the vocabulary, or leave none to sample."""
    for name in ("logit_bias", "banned_token_ids", "stop_token_ids", "allowed_token_ids", "prediction"):
        for token_id in getattr(params, name) or ():
            if not 0 <= token_id < vocab_size:
                raise ConfigError(
                    f"{name}: token id {token_id} is outside the vocabulary of {vocab_size}: "
                    "take this model's tokenizer."
                )
    banned = set(params.banned_token_ids)
    if params.min_tokens:
        banned |= {*eos_ids, *params.stop_token_ids}
    allowed = params.allowed_token_ids
    if len(banned) >= vocab_size if allowed is None else banned.issuperset(allowed):
        raise ConfigError(
            "allowed_token_ids, banned_token_ids and min_tokens together leave no token to sample: allow one more."
        )


def check_grammar(
    grammar: CompiledGrammar, params: SamplingParams, *, vocab_size: int, eos_ids: frozenset[int]
) -> None:
    """Raises GrammarError where the other parameters leave the grammar no token to begin with."""
    if GrammarState(grammar, params, eos_ids=eos_ids, vocab_size=vocab_size).status != "open":
        raise GrammarError(
            "grammar, allowed_token_ids, banned_token_ids and min_tokens together leave no token to begin with: "
            "allow one more."
        )


def check_drafter(params: SamplingParams, members: tuple[str, ...]) -> None:
    """Raises ConfigError for a drafter that is not among those of the engine."""
    if not any(map(params.drafting.allows, (*members, "none"))):
        raise ConfigError(
            f"method {params.drafting.method!r:.100} is no drafter of this engine: take "
            f"{', '.join(('auto', *members))} or none."
        )
