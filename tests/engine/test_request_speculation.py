"""Speculation per request: caps and chosen drafters, which cannot alter the text, beside requests with other wishes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline import RequestSpeculation, SamplingParams
from paceline.draft.draft_model import DraftModelDrafter
from paceline.draft.hybrid import HybridDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.prediction import PredictionDrafter
from paceline.errors import ConfigError
from paceline.testing import ScriptedDrafter, ToyModel
from paceline.types import Draft, RequestView
from toy_engine import PROMPT, TOKENIZER, make_engine, oracle, run

V = TOKENIZER.vocab_size
WISHES: list[dict[str, Any] | bool] = [
    True, False, {}, {"num_speculative_tokens": 1}, {"num_speculative_tokens": 2}, {"num_speculative_tokens": 64},
    {"method": "auto"}, {"method": "none"}, {"method": "right"}, {"method": "ngram", "num_speculative_tokens": 3},
]  # fmt: skip


class Right(ScriptedDrafter):
    """Knows the answers; notes which requests it was asked about, and with what budgets."""

    name = "right"

    def __init__(self, answer: Sequence[int], **options: Any) -> None:
        super().__init__(oracle([*PROMPT, *answer], **options))
        self.asked: dict[str, set[int]] = {}

    def propose(self, views, budgets) -> list[Draft | None]:
        for view, budget in zip(views, budgets, strict=True):
            self.asked.setdefault(view.request_id, set()).add(budget)
        return super().propose(views, budgets)


def params_of(wish: dict[str, Any] | bool, temperature: float = 0.0, **options: Any) -> SamplingParams:
    speculation = RequestSpeculation.parse(wish)
    return SamplingParams(
        temperature=temperature, seed=4, max_tokens=24, ignore_eos=True, speculation=speculation, **options
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_in_one_batch_each_gets_what_it_wishes_and_the_text_of_plain_decoding(temperature: float) -> None:
    plain = run(make_engine(), [PROMPT], params_of(False, temperature))[0]
    right = Right(plain.token_ids, tree=True)
    hybrid = HybridDrafter([NgramDrafter(min_ngram=1), right], vocab_size=V)
    engine = make_engine(drafter=hybrid, num_draft_tokens=6, max_num_seqs=16, max_num_batched_tokens=512)
    outputs = run(engine, [PROMPT] * len(WISHES), [params_of(wish, temperature) for wish in WISHES])
    assert [output.token_ids for output in outputs] == [plain.token_ids] * len(WISHES)
    for wish, output in zip(WISHES, outputs, strict=True):
        options = {} if isinstance(wish, bool) else wish
        drafting = output.metrics.num_draft_tokens_per_drafter
        plainly = wish is False or options.get("method") == "none"
        assert (output.metrics.num_drafts == 0) == plainly
        if options.get("method") in ("right", "ngram"):
            assert set(drafting) == {options["method"]}
        cap = options.get("num_speculative_tokens", 6)
        assert output.metrics.num_draft_tokens <= min(cap, 6) * output.metrics.num_drafts
        allowed = not plainly and options.get("method") != "ngram"
        budgets = right.asked.get(f"{output.request_id}/0", set())
        assert max(budgets, default=0) == (min(cap, 6) if allowed else 0)


@pytest.mark.parametrize("cap", [1, 3])
def test_a_cap_holds_for_predictions_too(cap: int) -> None:
    plain = run(make_engine(), [PROMPT], params_of(False))[0]
    drafter = PredictionDrafter(NgramDrafter(), max_draft_tokens=4)
    engine = make_engine(drafter=drafter, max_predicted_tokens=16)
    [output] = run(engine, [PROMPT], params_of({"num_speculative_tokens": cap}, prediction=plain.token_ids))
    assert output.token_ids == plain.token_ids
    assert 0 < output.metrics.num_draft_tokens <= cap * output.metrics.num_drafts


def test_a_request_may_be_drafted_from_its_prediction_alone() -> None:
    plain = run(make_engine(), [PROMPT], params_of(False))[0]
    right = Right(plain.token_ids)
    engine = make_engine(drafter=PredictionDrafter(right, max_draft_tokens=4))
    mixed = [*plain.token_ids[:12], *(2, 3) * 9]
    for wish, other in (({"method": "prediction"}, False), ({}, True)):
        [output] = run(engine, [PROMPT], params_of(wish, prediction=mixed))
        assert output.token_ids == plain.token_ids
        assert output.metrics.accepted_prediction_tokens > 0
        assert bool(right.asked) == other


@pytest.mark.parametrize(
    ("method", "drafter", "remedy"),
    [
        ("suffix", NgramDrafter(), "take auto, ngram or none."),
        ("ngram+right", HybridDrafter([NgramDrafter(), Right([])], vocab_size=V), "take auto, ngram, right or none."),
        ("suffix", PredictionDrafter(NgramDrafter(), max_draft_tokens=4), "take auto, ngram, prediction or none."),
        ("ngram", None, "take auto or none."),
    ],
)
def test_a_drafter_that_is_not_there_is_refused_with_those_that_are(method: str, drafter: Any, remedy: str) -> None:
    engine = make_engine(drafter=drafter)
    with pytest.raises(ConfigError, match=re.escape(f"{method!r} is no drafter of this engine: {remedy}")):
        engine.add_request(PROMPT, params_of({"method": method}))
    assert not engine.has_unfinished
    for fine in ("none", "auto"):
        engine.check_request(PROMPT, params_of({"method": fine}))


def law_engine(rule: str, **options: Any):
    model = ToyModel(vocab_size=V, seed=3, order=3, drift=0.5, num_blocks=64, block_size=4, max_model_len=128)
    drafter = DraftModelDrafter(model, rule_needs_law=True, max_num_batched_tokens=64, eos_ids=TOKENIZER.eos_ids)
    drafter = PredictionDrafter(drafter, max_draft_tokens=4)
    return make_engine(drafter=drafter, rule=rule, max_predicted_tokens=8, **options)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_under_rules_on_laws_a_cap_moves_the_text_but_it_stays_reproducible(rule: str) -> None:
    texts = {}
    for cap in (1, 2, 4, 9):
        params = params_of({"num_speculative_tokens": cap}, 0.8)
        alone = run(law_engine(rule), [PROMPT], params)[0]
        beside = run(law_engine(rule, max_num_batched_tokens=512), [PROMPT, PROMPT[:5]], [params, params_of(True)])[0]
        assert alone.token_ids == beside.token_ids
        assert alone.reproducible
        assert beside.reproducible
        assert alone.metrics.num_draft_tokens_per_drafter == {"draft_model": alone.metrics.num_draft_tokens}
        texts[cap] = alone.token_ids
    assert texts[4] == texts[9]  # the engine's own length
    assert len(set(texts.values())) == 3


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_under_rules_on_laws_a_prediction_decides_on_lengths_so_it_is_not_called_reproducible(rule: str) -> None:
    plain = run(make_engine(), [PROMPT], params_of(False))[0]
    [output] = run(law_engine(rule), [PROMPT], params_of(True, prediction=plain.token_ids))
    assert output.token_ids == plain.token_ids  # greedy: no law to move
    assert not output.reproducible
    assert run(law_engine(rule), [PROMPT], params_of(False, prediction=plain.token_ids))[0].reproducible


def test_a_hybrid_gives_each_request_the_drafters_that_it_takes() -> None:
    members = [ScriptedDrafter(lambda _, token=token: [token]) for token in (5, 6)]
    for member, name in zip(members, "ab", strict=True):
        member.name = name
    hybrid = HybridDrafter(members, vocab_size=V)
    known = np.array([2, 3], np.int32)
    views = [
        RequestView(name, known, 1, params_of({"method": name}), seed=0, stream=0, attempt=0)
        for name in ("a", "b", "auto")
    ]
    drafts = hybrid.propose(views, [4, 4, 4])
    assert [None if draft is None else sorted(draft.token_ids.tolist()) for draft in drafts] == [[5], [6], [5, 6]]
