"""The engine driven at random: arrivals, cancellations, preemption, drafts of every kind, on tiny K/V budgets.

Whatever happens, integrity holds after each step, no request is lost, every output is the one that a plain engine
writes for the request alone, and all blocks are free at the end. ToyModel notices keys that are not a row's own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_scenarios import (
    ALONE,
    CONTEXT,
    STEM,
    Arrival,
    Scenario,
    Setting,
    V,
    any_params,
    any_setting,
    arrivals,
    engine_of,
    greedy_params,
    plain_alone,
    play,
    prompts,
    toy,
)
from paceline.draft.draft_model import DraftModelDrafter
from paceline.params import SamplingParams
from paceline.sampling.processors import PenaltyState, allowed_mask, pack_adjustments
from paceline.sampling.sampler import sample_rows
from paceline.testing import ToyModel
from paceline.types import ForwardBatch, RowSampling
from toy_engine import TOKENIZER

in_small_doses = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@settings(in_small_doses, max_examples=150)
@given(
    any_setting(
        (
            "none",
            "right",
            "wrong",
            "tree",
            "mixed",
            "ngram",
            "suffix",
            "recycle",
            "draft_model",
            "draft_tree",
            "layer_skip",
            "hybrid",
        )
    ),
    arrivals(any_params()),
)
def test_coupled_writes_what_plain_decoding_writes(setting: Setting, plan: list[Arrival]) -> None:
    play(setting, plan)


@settings(in_small_doses, max_examples=60)
@given(
    any_setting(("right", "wrong", "ngram", "draft_model")),
    arrivals(greedy_params),
    st.sampled_from(["rejection", "block"]),
)
def test_greedy_chains_write_what_plain_decoding_writes_under_the_rules_on_laws(setting, plan, rule) -> None:
    play(setting, plan, rule=rule)


@settings(in_small_doses, max_examples=50)
@given(
    any_setting(("right", "wrong", "ngram", "draft_model")),
    arrivals(any_params()),
    st.sampled_from(["rejection", "block", "typical"]),
)
def test_rules_on_laws_lose_nothing(setting: Setting, plan: list[Arrival], rule: str) -> None:
    play(setting, plan, rule=rule, equal=False)


def definition(arrival: Arrival, stream: int) -> list[int]:
    """Plain decoding token by token, each from a pass of its own over the whole text."""
    params, text = arrival.params, list(arrival.prompt)
    penalties = PenaltyState(params, text, eos_ids=TOKENIZER.eos_ids, vocab_size=V)
    model = toy(num_blocks=1, block_size=CONTEXT)
    while True:
        count = len(text)
        batch = ForwardBatch(
            token_ids=np.array(text, dtype=np.int32),
            positions=np.arange(count, dtype=np.int32),
            slots=np.arange(count, dtype=np.int64),
            query_starts=np.array([0, count], dtype=np.int32),
            context_lengths=np.zeros(1, dtype=np.int32),
            block_tables=[np.zeros(1, dtype=np.int32)],
            ancestors=[None],
            logit_rows=np.array([count - 1], dtype=np.int32),
        )
        logits = model.forward(batch).logits
        assert logits is not None
        allowed = allowed_mask(params, vocab_size=V)
        sampling = RowSampling(
            temperature=np.array([params.temperature], dtype=np.float32),
            top_k=np.array([params.top_k], dtype=np.int32),
            top_p=np.array([params.top_p], dtype=np.float32),
            min_p=np.array([params.min_p], dtype=np.float32),
            seed=np.array([params.seed], dtype=np.uint64),
            stream=np.array([stream], dtype=np.uint32),
            position=np.array([count], dtype=np.uint32),
            purpose=np.zeros(1, dtype=np.uint32),
            adjustments=pack_adjustments(penalties.rows(None, num_output=count - len(arrival.prompt))),
            allowed=None if allowed is None else allowed[None],
        )
        token_ids = sample_rows(logits, sampling).token_ids
        assert token_ids is not None
        token = int(token_ids[0])
        text.append(token)
        penalties.append([token])
        num_output = len(text) - len(arrival.prompt)
        ends = token in params.stop_token_ids or (token in TOKENIZER.eos_ids and not params.ignore_eos)
        if ends or num_output == params.max_tokens or len(text) == CONTEXT:
            return text[len(arrival.prompt) :]


@settings(in_small_doses, max_examples=40)
@given(prompts, any_params())
def test_plain_decoding_is_what_its_definition_says(prompt: tuple[int, ...], params: SamplingParams) -> None:
    arrival = Arrival(prompt, replace(params, stop=()), 0, None, False)
    for choice in plain_alone(arrival).outputs:
        assert list(choice.token_ids) == definition(arrival, choice.index)


def test_choices_share_the_prompt_copy_on_write() -> None:
    """Four choices of a prompt of ten tokens: two full blocks are shared, the partial one is copied."""
    setting = replace(ALONE, prefix_caching=True, drafter="mixed", num_draft_tokens=3)
    params = SamplingParams(temperature=1.0, seed=2, n=4, max_tokens=9, ignore_eos=True)
    scenario = Scenario(setting, [Arrival(tuple(STEM[:10]), params, 0, None, True)], rule="coupled")
    scenario.arrive(0)
    engine = scenario.engine
    while len(engine.scheduler.running) < 4:
        for delta in engine.step():
            scenario.take(delta)
    tables = [engine.cache.block_table(sequence.id).tolist() for sequence in engine.scheduler.running]
    assert all(table[:2] == tables[0][:2] for table in tables)
    assert len({table[2] for table in tables}) == 4
    assert isinstance(engine.runner, ToyModel)
    assert engine.runner.num_tokens < 2 * 10 + 4 * 3  # the prompt was computed once
    scenario.run()
    scenario.check_end()
    scenario.check_equal_to_plain()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_target_that_drafts_for_itself_has_every_token_accepted(temperature: float) -> None:
    model = toy(num_blocks=100, block_size=4)
    drafter = DraftModelDrafter(model, rule_needs_law=False, eos_ids=TOKENIZER.eos_ids)
    setting = replace(ALONE, num_draft_tokens=4)
    engine = engine_of(toy(num_blocks=100, block_size=4), drafter=drafter, setting=setting)
    params = SamplingParams(
        temperature=temperature, seed=5, n=3, min_tokens=9, max_tokens=20, repetition_penalty=1.2, frequency_penalty=0.3
    )
    engine.add_request(STEM, params)
    (output,) = [delta.output for _ in range(20) if engine.has_unfinished for delta in engine.step() if delta.output]
    kinds = {origin for choice in output.outputs for origin in choice.origins}
    assert kinds == {"plain", "accepted", "bonus"}
    assert output.metrics.num_accepted_tokens > 20


def test_cancelled_choices_show_all_their_text() -> None:
    setting = replace(ALONE, num_draft_tokens=1)
    lost = []
    for seed in range(20):
        params = SamplingParams(temperature=1.0, seed=seed, n=2, stop=("ha", "bc", "a a"), max_tokens=20)
        scenario = Scenario(setting, [Arrival(tuple(STEM), params, 0, 5, True)], rule="coupled")
        scenario.run()
        (output,) = scenario.outputs.values()
        for choice in output.outputs:
            shown = "".join(d.text for d in scenario.deltas[output.request_id] if d.index == choice.index)
            lost += [seed] * (shown != choice.text)
    assert not lost


def test_preemption_happens_and_changes_nothing() -> None:
    setting = Setting(4, 10, 4, 64, True, 4, "mixed", 0, seed=1)
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    plan = [Arrival(tuple(STEM[:k]), replace(params, seed=k), 0, None, False) for k in (12, 9, 6, 3)]
    scenario = Scenario(setting, plan, rule="coupled")
    scenario.run()
    scenario.check_end()
    scenario.check_equal_to_plain()
    assert scenario.engine.scheduler.num_preemptions > 0
