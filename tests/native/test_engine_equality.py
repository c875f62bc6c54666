"""The engine's promise on real arithmetic: with the native runner, whatever is drafted, batched, chunked, cached or
preempted, every output is to the bit the one that plain decoding writes for the request alone. No tolerance."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from engine_scenarios import (
    CONTEXT,
    WIDE_CONTEXT,
    Arrival,
    Setting,
    V,
    any_params,
    any_setting,
    arrivals,
    greedy_params,
    long_params,
    play,
    wide_setting,
)
from native_models import PLAIN, random_weights
from paceline.models.native_runner import NativeRunner
from paceline.models.native_weights import PackedWeights

SPEC = replace(PLAIN, vocab_size=V, context_length=WIDE_CONTEXT, num_layers=2, ropes=PLAIN.ropes[:2], windows=(None, 9))
without_logprobs = greedy_params.map(lambda params: replace(params, logprobs=None))  # under such rules NumPy's
in_small_doses = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@cache
def weights(drift: float) -> PackedWeights:
    """A draft model is the target with another final norm: it agrees more often than not."""
    packed = random_weights(SPEC, "Q8_0")
    final = packed.vectors["model.norm.weight"]
    noise = drift * np.random.default_rng(1).standard_normal(final.shape).astype(np.float32)
    return PackedWeights(matrices=packed.matrices, vectors={**packed.vectors, "model.norm.weight": 3 * final + noise})


def native(
    *, num_blocks: int, block_size: int, drift: float = 0.0, max_model_len: int = CONTEXT, kv_cache_dtype="int16"
) -> NativeRunner:
    return NativeRunner(
        SPEC,
        weights(drift),
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        kv_cache_dtype=kv_cache_dtype,
        num_threads=1,  # more threads are the subject of test_invariance
    )


def native_int8(**options) -> NativeRunner:
    return native(**options, kv_cache_dtype="int8")


def native_wide(**options) -> NativeRunner:
    return native(**options, max_model_len=WIDE_CONTEXT)


@pytest.mark.parametrize("make_runner", [native, native_int8])
@settings(in_small_doses, max_examples=50)
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
            "draft_model",
            "draft_tree",
            "layer_skip",
            "hybrid",
        )
    ),
    arrivals(any_params()),
)
def test_coupled_writes_what_plain_decoding_writes(make_runner, setting: Setting, plan: list[Arrival]) -> None:
    play(setting, plan, make_runner=make_runner)


@settings(in_small_doses, max_examples=25)
@given(wide_setting(), arrivals(long_params(any_params())))
def test_trees_of_any_size_and_shape(setting: Setting, plan: list[Arrival]) -> None:
    play(setting, plan, make_runner=native_wide)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@settings(in_small_doses, max_examples=20)
@given(any_setting(("right", "wrong", "ngram", "draft_model")), arrivals(without_logprobs))
def test_greedy_chains_under_the_rules_on_laws(rule: str, setting: Setting, plan: list[Arrival]) -> None:
    play(setting, plan, rule=rule, make_runner=native)
