"""Passes that stand alone: what `verify` holds outputs against, and what it looks at where two runs differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.engine.engine import Engine
from paceline.engine.packing import pack
from paceline.engine.request import Request
from paceline.engine.scheduler import ScheduledSequence
from paceline.errors import CacheError
from paceline.params import SamplingParams
from paceline.types import Draft, ForwardOutput, RowSampling


def last_row(
    engine: Engine, token_ids: np.ndarray, params: SamplingParams, *, prompt_length: int, seed: int, stream: int = 0
) -> tuple[np.ndarray, RowSampling]:
    """Raw logits [V] of the row after token_ids [known], and how plain decoding would sample it.

    Raises CacheError if what is running leaves too few K/V blocks for all tokens; they are given back afterwards.
    """
    output, sampling = _last_pass(
        engine, token_ids, params, prompt_length=prompt_length, seed=seed, stream=stream, want_logits=True
    )
    assert output.logits is not None
    return output.logits[0], sampling


def forced_tokens(
    engine: Engine, prompt_ids: np.ndarray, output_ids: np.ndarray, params: SamplingParams, *, seed: int
) -> np.ndarray:
    """What the target samples at the place of each output token [N] int32, after the prompt [P] and the output tokens
    before it: all in one pass, or in as few as may be, as if the output had been fed to it rather than been written.

    Raises CacheError like last_row.
    """
    sampled = []
    step = engine.scheduler.config.max_num_batched_tokens
    for start in range(0, len(output_ids), step):
        known = np.concatenate([prompt_ids, output_ids[:start]])
        draft = Draft.chain(output_ids[start : start + step][:-1], source="output")
        output, _ = _last_pass(engine, known, params, prompt_length=len(prompt_ids), seed=seed, draft=draft)
        assert output.token_ids is not None
        sampled.append(output.token_ids)
    return np.concatenate(sampled)


def _last_pass(
    engine: Engine,
    token_ids: np.ndarray,
    params: SamplingParams,
    *,
    prompt_length: int,
    seed: int,
    stream: int = 0,
    draft: Draft | None = None,
    want_logits: bool = False,
) -> tuple[ForwardOutput, RowSampling]:
    """The pass that ends with the last of token_ids and the nodes after it, with the chunks before it."""
    request = Request(
        0,  # which no other request has
        token_ids[:prompt_length],
        replace(params, n=stream + 1, prompt_logprobs=None),
        seed=seed,
        tokenizer=engine.tokenizer,
        eos_ids=engine.tokenizer.eos_ids,
        vocab_size=engine.runner.vocab_size,
        grammar=None if params.grammar is None else engine.grammars.compile(params.grammar),
    )
    sequence = request.sequences[stream]
    sequence.append(token_ids[prompt_length:].tolist())
    chunk = engine.scheduler.config.max_num_batched_tokens
    try:
        while True:
            num_tokens = min(sequence.pending, chunk)
            last = num_tokens == sequence.pending
            own = draft if last and draft is not None and len(draft) else None
            num_nodes = 0 if own is None else len(own)
            part = ScheduledSequence(sequence, num_tokens, samples=last, draft_limit=num_nodes)
            copies = engine.cache.allocate(
                sequence.id, num_computed=sequence.num_computed, num_new=num_tokens + num_nodes
            )
            if copies is None:
                raise CacheError("the KV cache has no room for this row: finish or close what is running first.")
            part.constrain(own)
            batch, sampling, _ = pack([part], [own], engine.cache, want_laws=False)
            if sampling is not None:
                return engine.runner.forward(batch, replace(sampling, want_logits=want_logits)), sampling
            engine.runner.forward(batch)
            sequence.num_computed += num_tokens
    finally:
        engine.cache.free(sequence.id)
