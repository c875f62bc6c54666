"""Trees of a draft model: the text stays the target's, children are the best candidates of their parent's row."""

from __future__ import annotations

import numpy as np
import pytest
from test_draft_model import PROMPT, continuation, last_logits, law, view

from paceline.draft.draft_model import DraftModelDrafter
from paceline.params import SamplingParams
from paceline.sampling.noise import PhiloxNoise
from paceline.testing import ToyModel
from paceline.types import Draft
from toy_engine import TOKENIZER, make_engine, run

PARAMS = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": -0.3},
    {"temperature": 1.0, "top_k": 3, "allowed_token_ids": range(2, 9), "logit_bias": {5: 1.0}, "min_tokens": 12},
]


def drafter(*, width: int = 3, least_reach: float = 0.0, drift: float = 0.0, **options) -> DraftModelDrafter:
    sizes = {"vocab_size": 12, "num_blocks": 16, "block_size": 4}
    model = ToyModel(**{**sizes, "drift": drift, **options})
    return DraftModelDrafter(
        model,
        rule_needs_law=False,
        width=width,
        least_reach=least_reach,
        eos_ids=TOKENIZER.eos_ids,
        max_num_batched_tokens=11,
    )


def propose(subject: DraftModelDrafter, *views, budget: int = 9) -> list[Draft | None]:
    drafts = subject.propose(views, [budget] * len(views))
    subject.cache.check_integrity()
    return drafts


def paths(draft: Draft) -> list[list[int]]:
    """The tokens from the root down to each node."""
    result: list[list[int]] = []
    for token, parent in zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True):
        result.append([*(result[parent] if parent >= 0 else []), token])
    return result


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("width", [2, 4])
def test_a_batch_is_written_as_without_a_drafter(params, width):
    each = [SamplingParams(max_tokens=n, seed=n, ignore_eos=n > 30, **params) for n in (40, 25, 33)]
    prompts = [TOKENIZER.encode(text) for text in ("abcab.hef", "hhh", "a b c. a b ")]
    plain = run(make_engine(), prompts, each)
    model = {"vocab_size": TOKENIZER.vocab_size, "seed": 3, "order": 3, "num_blocks": 40, "max_model_len": 50}
    engine = make_engine(drafter=drafter(width=width, drift=1.0, **model), num_draft_tokens=7)
    assert [output.token_ids for output in run(engine, prompts, each)] == [output.token_ids for output in plain]
    assert engine.metrics.acceptance_rate > 0.05


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_children_are_the_best_scores_of_their_parents_row(temperature):
    (draft,) = propose(drafter(), view(PROMPT, temperature=temperature))
    assert draft is not None
    assert len(draft) == 9
    children: dict[tuple[int, ...], list[int]] = {}
    for path in paths(draft):
        children.setdefault(tuple(path[:-1]), []).append(path[-1])
    for path, found in children.items():
        text = [*PROMPT, *path]
        scores = last_logits(text)
        if temperature:
            noise = PhiloxNoise(11).uniforms(position=len(text), purpose=0, attempt=0, vocab_size=12)
            scores = law(text, temperature) / -np.log(noise)
        assert found == np.argsort(-scores)[: len(found)].tolist()


def test_the_first_children_are_the_models_own_text():
    (draft,) = propose(drafter(width=2), view(PROMPT), budget=16)
    assert draft is not None
    longest = max(paths(draft), key=len)
    own = [path for path in paths(draft) if path == continuation(PROMPT, len(path))]
    assert len(own) >= 2
    assert len(longest) >= 3


def test_nodes_are_those_most_likely_to_be_reached():
    """Against a tree that knows all rows: of four children a node, four levels deep."""
    (draft,) = propose(drafter(width=4), view(PROMPT), budget=6)
    assert draft is not None
    reach: dict[tuple[int, ...], float] = {(): 1.0}
    for depth in range(4):
        for path in [path for path in reach if len(path) == depth]:
            logits = last_logits([*PROMPT, *path])
            best = np.argsort(-logits)[:8]
            weights = np.exp(logits[best] - logits[best[0]])
            for token, weight in zip(best[:4].tolist(), weights, strict=False):
                reach[(*path, token)] = reach[path] * weight / weights.sum()
    del reach[()]
    best_paths = sorted(reach, key=lambda path: -reach[path])[:6]
    assert max(map(len, best_paths)) < 4, "a deeper level would not count"
    assert sorted(map(tuple, paths(draft))) == sorted(best_paths)


def test_unlikely_nodes_are_left_out():
    (draft,) = propose(drafter(least_reach=0.15), view(PROMPT), budget=16)
    assert draft is not None
    assert draft.confidence is not None
    reach: list[float] = []
    for parent, chance in zip(draft.parents.tolist(), draft.confidence.tolist(), strict=True):
        reach.append(chance * (reach[parent] if parent >= 0 else 1))
    assert min(reach) >= 0.15
    assert propose(drafter(least_reach=0.99), view(PROMPT)) == [None]


def test_a_request_drafts_the_same_alone_and_in_company():
    views = [view(PROMPT * k, request_id=str(k), temperature=0.7, top_k=5) for k in (1, 2, 3)]
    alone = [propose(drafter(num_blocks=64), own)[0] for own in views]
    together = propose(drafter(num_blocks=64), *views)
    for one, other in zip(alone, together, strict=True):
        assert one is not None
        assert other is not None
        assert paths(one) == paths(other)


def test_a_tree_ends_at_the_models_context():
    for max_model_len, most in ((10, 3), (8, 1)):
        (draft,) = propose(drafter(max_model_len=max_model_len), view(PROMPT))
        assert draft is not None
        assert len(draft) == most
    assert propose(drafter(max_model_len=7), view(PROMPT)) == [None]
