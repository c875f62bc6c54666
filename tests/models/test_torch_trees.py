"""Trees through the engine on torch's arithmetic: the ids are those of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
from hypothesis import HealthCheck, given, settings

from engine_scenarios import WIDE_CONTEXT, Arrival, Setting, V, any_params, arrivals, long_params, play, wide_setting
from paceline.models.architecture import ModelSpec
from paceline.models.rope import RopeSpec
from paceline.models.torch_runner import TorchRunner
from paceline.models.weights import expected_shapes

SPEC = ModelSpec(
    architecture="qwen2",
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    context_length=WIDE_CONTEXT,
    norm_eps=1e-6,
    ropes=(RopeSpec(theta=10_000.0, dim=8),) * 2,
    windows=(None, 9),
    attention_scale=8**-0.5,
)
# Log-probabilities differ by rounding between packings
params = any_params().map(lambda own: replace(own, logprobs=None, prompt_logprobs=None))


@cache
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else (3 * rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        for name, shape in expected_shapes(SPEC).items()
    }


def tiny(*, num_blocks: int, block_size: int) -> TorchRunner:
    return TorchRunner(SPEC, weights(), num_blocks=num_blocks, block_size=block_size, num_threads=1)


@settings(
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    max_examples=6,
)
@given(wide_setting(), arrivals(long_params(params)))
def test_coupled_writes_what_plain_decoding_writes(setting: Setting, plan: list[Arrival]) -> None:
    play(setting, plan, make_runner=tiny)
