"""Trees of 1 to 64 nodes and any shape through the engine, on the toy model that notices every mistake in its cache.

The native engine's are in tests/native/test_engine_equality.py, torch's in tests/models/test_torch_trees.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from engine_scenarios import (
    ALONE,
    STEM,
    WIDE_CONTEXT,
    Arrival,
    Scenario,
    Setting,
    any_params,
    arrivals,
    engine_of,
    long_params,
    play,
    toy,
    wide_setting,
)
from paceline.params import SamplingParams
from paceline.testing import ScriptedDrafter, ToyModel
from paceline.types import Draft, RequestView

in_small_doses = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
PENALISED = SamplingParams(
    temperature=1.0, seed=4, max_tokens=60, ignore_eos=True,
    repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3,
)  # fmt: skip


def wide_toy(**options: int) -> ToyModel:
    return toy(**{"max_model_len": WIDE_CONTEXT, **options})


@settings(in_small_doses, max_examples=25)
@given(wide_setting(), arrivals(long_params(any_params())))
def test_coupled_writes_what_plain_decoding_writes(setting: Setting, plan: list[Arrival]) -> None:
    play(setting, plan, make_runner=wide_toy)


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_crowded_trees_are_accepted_moved_preempted_and_copied(block_size: int) -> None:
    """What the random scenarios are for does happen: long paths out of their slots, preemption, shared prompts."""
    num_blocks = -(-WIDE_CONTEXT // block_size) + 64 // block_size
    setting = Setting(block_size, num_blocks, 6, 256, True, 48, "tree", 0, seed=2)
    plan = [Arrival(tuple(STEM[:k]), replace(PENALISED, seed=k, n=2), 0, None, False) for k in (12, 9, 6)]
    scenario = Scenario(setting, plan, rule="coupled", make_runner=wide_toy)
    moves: list[int] = []
    runner = scenario.engine.runner
    move = runner.move

    def counting(src_slots: np.ndarray, dst_slots: np.ndarray) -> None:
        moves.append(len(src_slots))
        move(src_slots, dst_slots)

    runner.move = counting  # type: ignore[method-assign]
    scenario.run()
    scenario.check_end()
    scenario.check_equal_to_plain()
    assert scenario.engine.scheduler.num_preemptions > 0
    assert max(moves) > 3
    assert scenario.engine.metrics.acceptance_length > 1.5


@pytest.mark.parametrize("num_nodes", [3, 5, 8, 13, 21, 34, 55, 64])
@pytest.mark.parametrize("params", [PENALISED, replace(PENALISED, temperature=0.0, logprobs=2)], ids=["race", "greedy"])
def test_the_right_path_hidden_at_the_end_of_a_tree_is_accepted_whole(num_nodes: int, params: SamplingParams) -> None:
    """Each node of the path comes last among siblings that are wrong; penalties count the path before it."""
    setting = replace(ALONE, num_draft_tokens=num_nodes)
    plain = engine_of(wide_toy(num_blocks=100, block_size=4), setting=setting)
    plain.add_request(STEM, params)
    (expected,) = [delta.output for _ in range(99) if plain.has_unfinished for delta in plain.step() if delta.output]
    answer = [*STEM, *expected.token_ids]

    def hidden(view: RequestView) -> Draft:
        tokens, parents, parent = [], [], -1
        for token in answer[len(view.token_ids) :]:
            tokens += [(token + 1) % 11, (token + 2) % 11, token]
            parents += [parent] * 3
            parent = len(tokens) - 1
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), source="hidden")

    engine = engine_of(wide_toy(num_blocks=100, block_size=4), drafter=ScriptedDrafter(hidden), setting=setting)
    engine.add_request(STEM, params)
    outputs = []
    while engine.has_unfinished:
        outputs += [delta.output for delta in engine.step() if delta.output]
        engine.check_integrity()
    assert outputs[0].token_ids == expected.token_ids
    assert outputs[0].outputs[0].logprobs == expected.outputs[0].logprobs
    full = [count for count in outputs[0].metrics.num_accepted_tokens_per_pos if count]
    assert len(full) == min(num_nodes // 3, 19)  # near its end a draft is clipped to what may still be written
