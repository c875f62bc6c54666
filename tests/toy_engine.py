"""Engines on a toy model whose K/V pool notices every mistake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline import verify
from paceline.config import CacheConfig, SchedulerConfig
from paceline.engine.engine import Engine
from paceline.params import SamplingParams
from paceline.testing import CharTokenizer, ScriptedDrafter, ToyModel
from paceline.types import Draft, RequestOutput, RequestView

TOKENIZER = CharTokenizer("abcdefgh .")


def make_engine(
    script: Callable[[RequestView], Any] | None = None,
    *,
    drafter: Any = None,
    rule: str = "coupled",
    num_draft_tokens: int = 4,
    max_predicted_tokens: int | None = None,
    runner: ToyModel | None = None,
    tokenizer: Any = TOKENIZER,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    prefix_caching: bool = True,
    kind: Callable[..., Engine] = Engine,
) -> Engine:
    if script is not None:
        drafter = ScriptedDrafter(script)
    return kind(
        runner
        or ToyModel(vocab_size=tokenizer.vocab_size, seed=3, order=3, num_blocks=64, block_size=4, max_model_len=128),
        tokenizer=tokenizer,
        verifier=verify.create(rule, epsilon=0.3, alpha=0.09),
        drafter=drafter,
        max_draft_tokens=num_draft_tokens,
        max_predicted_tokens=max_predicted_tokens,
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
        cache=CacheConfig(block_size=4, prefix_caching=prefix_caching),
    )


def run(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    """All prompts in one batch; integrity is checked after every step."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    ids = [engine.add_request(list(p), own) for p, own in zip(prompts, each, strict=True)]
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        for delta in engine.step():
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
        engine.check_integrity()
    return [outputs[i] for i in ids]


def oracle(answer: Sequence[int], *, wrong_at: frozenset[int] = frozenset(), tree: bool = False) -> Callable:
    """A script that drafts what the target will say: `answer` = prompt + output, with errors at some indices."""

    def script(view: RequestView) -> Draft | list[int] | None:
        start = len(view.token_ids)
        coming = [t + 1 if i in wrong_at else t for i, t in enumerate(answer[start:], start)]
        coming = [t % TOKENIZER.vocab_size for t in coming]
        if not tree or len(coming) < 2:
            return coming
        decoy = (coming[0] + 1) % TOKENIZER.vocab_size  # a wrong sibling first: the accepted path must be moved
        ids = np.array([decoy, coming[0], decoy, coming[1], *coming[2:]], dtype=np.int32)
        parents = np.array([-1, -1, 1, 1, *range(3, 3 + len(coming) - 2)], dtype=np.int32)
        return Draft(token_ids=ids, parents=parents, source="oracle")

    return script


PROMPT = TOKENIZER.encode("abcabcab.hefgab")
