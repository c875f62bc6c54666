"""One logits row, computed plainly and on its own: what `verify` looks at where two runs differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.engine.engine import Engine
from paceline.engine.packing import pack
from paceline.engine.request import Request
from paceline.engine.scheduler import ScheduledSequence
from paceline.errors import CacheError
from paceline.params import SamplingParams
from paceline.types import RowSampling


def last_row(
    engine: Engine, token_ids: np.ndarray, params: SamplingParams, *, prompt_length: int, seed: int, stream: int = 0
) -> tuple[np.ndarray, RowSampling]:
    """Raw logits [V] of the row after token_ids [known], and how plain decoding would sample it.

    Raises CacheError if what is running leaves too few K/V blocks for all tokens; they are given back afterwards.
    """
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
            part = ScheduledSequence(sequence, num_tokens, samples=num_tokens == sequence.pending)
            copies = engine.cache.allocate(sequence.id, num_computed=sequence.num_computed, num_new=num_tokens)
            if copies is None:
                raise CacheError("the KV cache has no room for this row: finish or close what is running first.")
            part.constrain(None)
            batch, sampling, _ = pack([part], [None], engine.cache, want_laws=False)
            if sampling is not None:
                logits = engine.runner.forward(batch, replace(sampling, want_logits=True)).logits
                assert logits is not None
                return logits[0], sampling
            engine.runner.forward(batch)
            sequence.num_computed += num_tokens
    finally:
        engine.cache.free(sequence.id)
