"""Cost curves on a toy model, which checks every pass that is built by hand, and the order of the measurement."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.bench.cost_curve import Curve, measure
from paceline.control.passes import chain_pass, fill_context
from paceline.draft.draft_model import DraftModelDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.recycle import RecycleDrafter
from paceline.errors import ConfigError
from paceline.testing import ScriptedDrafter, ToyModel


class Recording(ToyModel):
    """A toy model that notes how many tokens each pass had, and how they were sampled."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.events: list = []
        self.samplings: list = []

    def forward(self, batch, sampling=None):
        self.events.append(len(batch.token_ids))
        self.samplings.append(sampling)
        return super().forward(batch, sampling)


def run(runner, **options) -> Curve:
    return measure(runner, **{"tokens": [1, 2, 5], "context": 40, "repeats": 3, **options})


def test_rounds_alternate_after_one_to_warm_up():
    runner, rounds = Recording(), []
    curve = run(runner, advance=lambda: rounds.append(len(runner.events)))
    context, *passes = runner.events
    assert context == 40
    assert passes == [5, 2, 1, 1, 2, 5, 5, 2, 1, 1, 2, 5]
    assert rounds == [7, 10, 13]
    assert [cost.tokens for cost in curve.target] == [1, 2, 5]
    assert all(0 < cost.low_ms <= cost.ms <= cost.high_ms for cost in curve.target)


def test_every_row_is_sampled_as_in_verification():
    runner = Recording()
    run(runner)
    filled, *sampled = runner.samplings
    assert filled is None
    for count, sampling in zip(runner.events[1:], sampled, strict=True):
        assert sampling.position.tolist() == list(range(41, 41 + count))
        assert not sampling.temperature.any()
        lengths = {len(getattr(sampling, name)) for name in ("top_k", "top_p", "min_p", "seed", "stream", "purpose")}
        assert lengths == {count}


def test_drafts_follow_passes():
    runner = Recording()
    drafter = ScriptedDrafter(lambda view: runner.events.append("draft") or [1, 2, 3])
    curve = run(runner, drafter=drafter, draft_tokens=[1, 3], repeats=1)
    assert runner.events[:2] == [40, 1], "the drafter is told of the context"
    assert runner.events[2:] == [5, 2, "draft", 1, "draft", 1, "draft", 2, "draft", 5]
    assert [cost.tokens for cost in curve.draft] == [1, 3]


def test_prompt_lookup_has_something_to_copy():
    for context in (8, 90):
        curve = run(ToyModel(vocab_size=4096), drafter=NgramDrafter(), draft_tokens=[1, 4], context=context)
        assert [cost.tokens for cost in curve.draft] == [1, 4]


def test_a_draft_model_catches_up_once_and_is_released():
    model = Recording(num_blocks=8)
    drafter = DraftModelDrafter(model, rule_needs_law=False, least_reach=0.0)
    run(ToyModel(), drafter=drafter, draft_tokens=[3], repeats=2)
    assert model.events == [40, 1, 1] + [1, 1, 1] * 2
    assert drafter.cache.num_allocatable("another", num_computed=0) == 8 * 16


def test_what_a_drafter_drafts_is_counted_not_what_it_may():
    curve = run(ToyModel(), drafter=ScriptedDrafter(lambda view: [1, 2]), draft_tokens=[1, 3])
    assert [(cost.tokens, cost.budget) for cost in curve.draft] == [(1, 1), (2, 3)]


def test_recycle_has_read_the_context():
    for context in (8, 90):
        drafter = RecycleDrafter(vocab_size=4096, least_reach=0.0)
        curve = run(ToyModel(vocab_size=4096), drafter=drafter, draft_tokens=[1, 16], context=context)
        assert [cost.tokens for cost in curve.draft] == [1, 16]


def test_a_drafter_that_drafts_nothing_is_refused():
    for method, drafter in (("ngram", NgramDrafter()), ("recycle", RecycleDrafter(vocab_size=32))):
        with pytest.raises(ConfigError, match=f"the drafter {method} proposes nothing after 1 tokens"):
            run(ToyModel(), drafter=drafter, draft_tokens=[3], context=1)


def test_a_drafter_gets_the_hidden_states_that_it_wants():
    class Seen(ToyModel):
        def forward(self, batch, sampling=None):
            hidden = {layer: np.zeros((len(batch.token_ids), 2)) for layer in batch.hidden_layers}
            return replace(super().forward(replace(batch, hidden_layers=()), sampling), hidden=hidden)

    class Learned(ScriptedDrafter):
        hidden_layers = (0, "final")

        def observe(self, step):
            assert set(step.hidden) == set(self.hidden_layers)
            assert step.starts.tolist() == [0, len(step.hidden[0])] == [0, 1]
            assert (len(step.views[0].token_ids), step.views[0].num_computed) == (40, 39)

    run(Seen(), drafter=Learned(lambda view: [1]), draft_tokens=[1])


def test_a_context_without_room_is_refused():
    with pytest.raises(ConfigError, match=r"--context 60 and a pass of 5 tokens do not fit into the 64 tokens"):
        run(ToyModel(max_model_len=64), context=60)


def test_chunks_make_the_same_context():
    ids = np.random.default_rng(0).integers(0, 32, size=300, dtype=np.int32)
    whole, chunked = ToyModel(), ToyModel()
    expected = whole.forward(chain_pass(ids, context=0, block_size=16)).logits
    fill_context(chunked, ids[:290])
    last = chain_pass(ids[290:], context=290, block_size=16)
    np.testing.assert_array_equal(chunked.forward(last).logits, expected[290:])
    assert chunked.forward(replace(last, logit_rows=last.logit_rows[:0])).logits.shape == (0, 32)
