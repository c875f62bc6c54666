"""The order of a measurement: modes interleaved, each announced before it runs, the warm-up silent."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from itertools import product

import pytest

from paceline import LLM, CacheConfig, EngineConfig, SamplingParams, SpeculationConfig
from paceline.bench import runner
from paceline.bench.runner import engines, measure, without_drafter
from paceline.bench.turns import Turns
from paceline.bench.workload import Prompt
from paceline.models.loader import load

PROMPTS = [Prompt(name, "chat", (f"{name} ab ab ab",)) for name in ("x", "y")]

CONFIG = EngineConfig(
    num_threads=1,
    cache=CacheConfig(kv_cache_memory=4 << 20, prefix_caching=False),
    speculation=SpeculationConfig(method="ngram"),
)


def events(model, *, repeats: int = 1, **options) -> list[tuple]:
    seen: list[tuple] = []
    measure(
        engines(load(str(model)), CONFIG, repeats=repeats),
        PROMPTS,
        params=SamplingParams(max_tokens=4, ignore_eos=True, seed=0),
        announce=lambda prompt, mode: seen.append(("next", prompt.id, mode)),
        observe=lambda sample: seen.append(("done", sample.prompt.id, sample.mode)),
        **options,
    )
    return seen


def test_one_request_at_a_time_alternates_the_modes_and_which_goes_first(tiny_llama):
    runs = [("x", "plain"), ("x", "speculative"), ("y", "speculative"), ("y", "plain")]
    runs += [("x", "speculative"), ("x", "plain"), ("y", "plain"), ("y", "speculative")]
    assert events(tiny_llama, repeats=2) == [(what, *run) for run in runs for what in ("next", "done")]


def test_at_once_all_prompts_run_in_both_modes(tiny_llama):
    seen = events(tiny_llama, repeats=2, at_once=True)
    assert sorted(seen) == sorted(2 * [("done", *run) for run in product("xy", ("plain", "speculative"))])


@pytest.mark.parametrize("at_once", [False, True])
def test_plain_runs_have_an_engine_without_a_drafter(tiny_llama, monkeypatch, at_once):
    made: list[tuple[LLM, LLM]] = []

    def noted(llm: LLM) -> LLM:
        made.append((llm, without_drafter(llm)))
        return made[-1][1]

    monkeypatch.setattr(runner, "without_drafter", noted)
    events(tiny_llama, repeats=2, at_once=at_once)
    assert len(made) == 2
    for llm, plain in made:
        assert plain.engine.drafter is None
        assert plain.engine.metrics.num_steps > 0
        assert plain.runner.kv == llm.runner.kv
        if llm.config.engine == "native":
            assert plain.runner.weights is llm.runner.weights


def test_while_others_have_their_turn_the_clock_stands_still(tiny_llama):
    llms = engines(load(str(tiny_llama)), CONFIG, repeats=2)
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    first, second = (Turns(llm, PROMPTS, params, turn_seconds=0.0) for llm in llms)  # a step each
    start, pauses, outputs = time.perf_counter(), 0, []
    while not (first.finished and second.finished):
        outputs += [output for _, output in first.take()]
        time.sleep(0.002)
        pauses += 1
        second.take()
    elapsed = time.perf_counter() - start
    assert 0 < first.seconds + second.seconds <= elapsed - 0.002 * pauses
    assert len(outputs) == len(PROMPTS)
    for output in outputs:
        assert 0 < output.decode_seconds + output.prefill_seconds <= first.seconds


def test_one_engine_is_gone_before_the_next_is_there(tiny_llama):
    def count():
        return sum(1 for one in made if one() is not None)

    made: list[weakref.ref] = []

    def watched():
        for llm in engines(load(str(tiny_llama)), CONFIG, repeats=3):
            gc.collect()
            assert count() == 0
            made.append(weakref.ref(llm))
            yield llm
            del llm

    measure(watched(), PROMPTS, params=SamplingParams(max_tokens=4, ignore_eos=True, seed=0))
    assert len(made) == 3


def test_a_measurement_leaves_a_drafters_file_as_it_is(tiny_llama, tmp_path):
    table = tmp_path / "table.npz"
    rule = SpeculationConfig(method="recycle", table=str(table))
    with LLM(str(tiny_llama), config=replace(CONFIG, speculation=rule)) as llm:
        llm.generate(["ab ab ab"], SamplingParams(max_tokens=4, ignore_eos=True))
    before = table.read_bytes()
    llms = engines(load(str(tiny_llama)), replace(CONFIG, speculation=rule), repeats=2)
    measure(llms, PROMPTS, params=SamplingParams(max_tokens=4, ignore_eos=True, seed=0))
    assert table.read_bytes() == before
