"""The order of a measurement: modes interleaved, each announced before it runs, the warm-up silent."""

from __future__ import annotations

from paceline import CacheConfig, EngineConfig, SamplingParams, SpeculationConfig
from paceline.bench.runner import engines, measure
from paceline.bench.workload import Prompt
from paceline.models.loader import load

PROMPTS = [Prompt(name, "chat", (f"{name} ab ab ab",)) for name in ("x", "y")]


def events(model, *, repeats: int = 1, **options) -> list[tuple]:
    config = EngineConfig(
        num_threads=1,
        cache=CacheConfig(kv_cache_memory=4 << 20, prefix_caching=False),
        speculation=SpeculationConfig(method="ngram"),
    )
    seen: list[tuple] = []
    measure(
        engines(load(str(model)), config, repeats=repeats),
        PROMPTS,
        params=SamplingParams(max_tokens=4, ignore_eos=True, seed=0),
        announce=lambda prompts, mode: seen.append(("next", *(prompt.id for prompt in prompts), mode)),
        observe=lambda sample: seen.append(("done", sample.prompt.id, sample.mode)),
        **options,
    )
    return seen


def test_one_request_at_a_time_alternates_the_modes_and_which_goes_first(tiny_llama):
    runs = [("x", "plain"), ("x", "speculative"), ("y", "speculative"), ("y", "plain")]
    runs += [("x", "speculative"), ("x", "plain"), ("y", "plain"), ("y", "speculative")]
    assert events(tiny_llama, repeats=2) == [(what, *run) for run in runs for what in ("next", "done")]


def test_with_concurrency_a_mode_gets_all_prompts_at_once(tiny_llama):
    plain, speculative = (
        [("next", "x", "y", mode), ("done", "x", mode), ("done", "y", mode)] for mode in ("plain", "speculative")
    )
    assert events(tiny_llama, concurrency=2) == plain + speculative
