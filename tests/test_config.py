"""Every rule of the configs: what is refused, by which words, and that what is right passes."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from paceline.config import PLUG_INS, CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig, usable_cores
from paceline.errors import ConfigError

METHODS = "none, auto, ngram, suffix, recycle, draft_model, layer_skip"
A_METHOD = f"method must be one of {METHODS}, some of them joined by +, or a plug-in as package.module:Class"
RULES = "coupled, rejection, block, typical"
A_MODEL = "a catalog name, folder, GGUF file or hub id"


def refusal(cls, options) -> str:
    with pytest.raises(ConfigError) as caught:
        cls(**options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (CacheConfig, {"block_size": 24}, "block_size must be a power of two; got 24. Try 16 or 32."),
        (CacheConfig, {"block_size": 0}, "block_size must be an integer >= 1; got 0: try 16."),
        (CacheConfig, {"block_size": 16.0}, "block_size must be an integer >= 1; got 16.0: try 16."),
        (CacheConfig, {"kv_cache_memory": 0}, "kv_cache_memory must be an integer >= 1; got 0: try 1073741824."),
        (CacheConfig, {"kv_cache_memory": "1G"}, "kv_cache_memory must be an integer >= 1; got '1G': try 1073741824."),
        (CacheConfig, {"prefix_caching": "no"}, "prefix_caching must be True or False; got 'no'."),
        (SchedulerConfig, {"max_num_seqs": 0}, "max_num_seqs must be an integer >= 1; got 0: try 1."),
        (SchedulerConfig, {"max_num_seqs": True}, "max_num_seqs must be an integer >= 1; got True: try 1."),
        (
            SchedulerConfig, {"max_num_batched_tokens": 0},
            "max_num_batched_tokens must be an integer >= 1; got 0: try 512.",
        ),
        (EngineConfig, {"engine": "steam"}, "engine must be one of auto, torch, native; got 'steam': try auto."),
        (EngineConfig, {"dtype": "int3"}, "dtype must be one of auto, float32, bfloat16; got 'int3': try auto."),
        (EngineConfig, {"quantization": "int5"}, "quantization must be one of int8, int4; got 'int5': try int8."),
        (
            CacheConfig, {"kv_cache_dtype": "float32"},
            "kv_cache_dtype must be one of auto, int16, int8; got 'float32': try auto.",
        ),
        (
            EngineConfig, {"engine": "native", "device": "cuda"},
            "the native engine runs on cpu only; got device 'cuda': try engine torch.",
        ),
        (
            EngineConfig, {"quantization": "int8", "dtype": "float32"},
            "quantization 'int8' and dtype 'float32' both say how weights are kept: drop one.",
        ),
        (
            EngineConfig, {"engine": "torch", "quantization": "int4"},
            "quantization is read by the native engine only; engine 'torch' on device 'cpu' would ignore it: drop it, "
            "or take engine native on cpu.",
        ),
        (
            EngineConfig, {"device": "cuda", "cache": CacheConfig(kv_cache_dtype="int8")},
            "kv_cache_dtype is read by the native engine only; engine 'auto' on device 'cuda' would ignore it: drop "
            "it, or take engine native on cpu.",
        ),
        (EngineConfig, {"device": ""}, "device must be a torch device such as cpu or cuda:0; got ''."),
        (EngineConfig, {"device": None}, "device must be a torch device such as cpu or cuda:0; got None."),
        (EngineConfig, {"max_model_len": 1}, "max_model_len must be an integer >= 2; got 1: try 2048."),
        (EngineConfig, {"num_threads": 0}, "num_threads must be an integer >= 1; got 0: try 1."),
        (EngineConfig, {"cache": None}, "cache must be a CacheConfig; got None."),
        (EngineConfig, {"scheduler": 8}, "scheduler must be a SchedulerConfig; got 8."),
        (EngineConfig, {"speculation": "ngram"}, "speculation must be a SpeculationConfig; got 'ngram'."),
        (SpeculationConfig, {"method": "telepathy"}, f"{A_METHOD}; got 'telepathy': try none."),
        (SpeculationConfig, {"method": "suffix+recicle"}, f"{A_METHOD}; got 'recicle': try recycle."),
        (SpeculationConfig, {"method": "suffix+"}, f"{A_METHOD}; got '': try none."),
        (SpeculationConfig, {"method": "my.module:"}, f"{A_METHOD}; got 'my.module:': try none."),
        (SpeculationConfig, {"method": "my-module:A"}, f"{A_METHOD}; got 'my-module:A': try none."),
        (
            SpeculationConfig, {"method": "auto+suffix"},
            "method 'auto' stands alone; got 'auto+suffix': drop it, or the others.",
        ),
        (
            SpeculationConfig, {"method": "ngram+suffix+ngram"},
            "method 'ngram+suffix+ngram' names 'ngram' more than once: once is enough.",
        ),
        (
            SpeculationConfig, {"method": "ngram+suffix", "verification": "block"},
            "method 'ngram+suffix' makes one tree of several drafts; verification 'block' takes chains of a single "
            "drafter: take coupled, or one method.",
        ),
        (
            SpeculationConfig, {"method": "suffix+draft_model"},
            f'method "draft_model" needs "model": {A_MODEL}.',
        ),
        (
            SpeculationConfig, {"method": "a.b:C", "options": 3},
            "options must be keyword arguments of the plug-in, by name; got 3.",
        ),
        (
            SpeculationConfig, {"method": "a.b:C+a.b:D", "options": {"depth": 3}},
            "options cannot tell the plug-ins of 'a.b:C+a.b:D' apart: give them defaults, or derive classes.",
        ),
        (
            SpeculationConfig, {"verification": "trust"},
            f"verification must be one of {RULES}; got 'trust': try coupled.",
        ),
        (
            SpeculationConfig, {"num_speculative_tokens": 0},
            "num_speculative_tokens must be an integer >= 1; got 0: try 5.",
        ),
        (
            SpeculationConfig, {"num_speculative_tokens": 65},
            "num_speculative_tokens must be at most 64; got 65: try 5.",
        ),
        (
            SpeculationConfig, {"method": "suffix", "num_speculative_tokens": 400},
            "num_speculative_tokens must be at most 64; got 400: try 8.",
        ),
        (
            SpeculationConfig, {"method": "suffix", "store_tokens": -1},
            "store_tokens must be an integer >= 0; got -1: try 100000.",
        ),
        (SpeculationConfig, {"min_ngram": 0}, "min_ngram must be an integer >= 1; got 0: try 1."),
        (SpeculationConfig, {"max_ngram": "4"}, "max_ngram must be an integer >= 1; got '4': try 1."),
        (
            SpeculationConfig, {"max_ngram": 1},
            "max_ngram must be at least min_ngram; got max_ngram 1 and min_ngram 2: set both.",
        ),
        (SpeculationConfig, {"method": "draft_model", "model": ""}, f"model must be {A_MODEL}; got ''."),
        (SpeculationConfig, {"method": "draft_model", "model": 7}, f"model must be {A_MODEL}; got 7."),
        *(
            (
                SpeculationConfig, {"method": "layer_skip", "layers": value},
                f"layers must be ascending integers >= 0; got {value!r}: try [0, 1, 3].",
            )
            for value in ([], [1, 0], [0, 0], [-1, 2], [0.0], [True], "0,1", 3)
        ),
        (SpeculationConfig, {"method": "draft_model"}, f'method "draft_model" needs "model": {A_MODEL}.'),
        (
            SpeculationConfig, {"method": "draft_model", "model": "m", "kv_cache_memory": "1G"},
            "kv_cache_memory must be an integer >= 1; got '1G': try 1073741824.",
        ),
        *(
            (SpeculationConfig, {"method": "draft_model", "model": "m", **options}, message)
            for options, message in (
                ({"width": 0}, "width must be an integer >= 1; got 0: try 1."),
                ({"width": 9}, "width must be at most 8; got 9: try 3."),
                (
                    {"width": 2, "verification": "block"},
                    "width 2 makes drafts trees; verification 'block' takes chains: take coupled, or width 1.",
                ),
                ({"engine": "auto "}, "engine must be one of auto, torch, native; got 'auto ': try auto."),
                ({"quantization": 8}, "quantization must be one of int8, int4; got 8: try int8."),
                ({"num_threads": 0}, "num_threads must be an integer >= 1; got 0: try 1."),
                *(
                    ({"least_reach": value}, f"least_reach must be a number in [0, 1); got {value!r}: try 0.2.")
                    for value in (1, -0.1, True, "0.5", float("nan"))
                ),
                ({"table": ""}, "table must be the name of a file; got '': try 'recycle.npz'."),
                ({"table": 3}, "table must be the name of a file; got 3: try 'recycle.npz'."),
                ({"force": None}, "force must be True or False; got None: leave it out."),
                ({"prefix_caching": 1}, "prefix_caching must be True or False or None; got 1: leave it out."),
            )
        ),
        *(
            (
                SpeculationConfig, {"verification": "typical", name: value},
                f"{name} must be a number in (0, 1]; got {value!r}.",
            )
            for name in ("typical_epsilon", "typical_alpha")
            for value in (0, 1.5, float("nan"), True, "0.3", None)
        ),
    ],
)  # fmt: skip
def test_values_outside_their_rule(cls, options, message):
    assert refusal(cls, options) == message


NEVER = {
    "model": "m", "kv_cache_memory": 5, "force": True, "engine": "torch", "quantization": "int8", "num_threads": 1,
    "prefix_caching": False,
}  # fmt: skip
NGRAM = {"max_ngram": 5, "min_ngram": 3}
TYPICAL = {"typical_epsilon": 0.5, "typical_alpha": 0.5}
UNREAD = [
    *(("none", {}, name, value) for name, value in {**NEVER, **NGRAM, **TYPICAL}.items()),
    *((method, {}, "layers", (0, 2)) for method in ("none", "auto", "suffix+recycle")),
    *(("layer_skip", {}, name, value) for name, value in {**NEVER, **NGRAM, **TYPICAL}.items()),
    ("none", {}, "num_speculative_tokens", 3),
    ("none", {}, "verification", "block"),
    ("none", {}, "control", "fixed"),
    *(("ngram", {}, name, value) for name, value in {**NEVER, **TYPICAL}.items()),
    *(("auto", {}, name, value) for name, value in {**NEVER, **NGRAM, **TYPICAL}.items() if name != "model"),
    *(("draft_model", {"model": "m"}, name, value) for name, value in {**NGRAM, **TYPICAL}.items()),
    *(("suffix+recycle", {}, name, value) for name, value in {**NEVER, **NGRAM, **TYPICAL}.items()),
    *(("a.b:C", {}, name, value) for name, value in {**NEVER, **NGRAM, **TYPICAL}.items()),
    *(
        ("draft_model", {"model": "m", "verification": rule}, "least_reach", 0.5)
        for rule in ("rejection", "block", "typical")
    ),
    ("suffix", {}, "options", {"depth": 3}),
    ("recycle", {}, "store_tokens", 5),
    *((method, {}, "table", "t.npz") for method in ("none", "suffix", "a.b:C")),
    ("auto", {"verification": "block"}, "table", "t.npz"),
]


@pytest.mark.parametrize(("method", "others", "name", "value"), UNREAD)
def test_options_that_nothing_reads_are_refused(method, others, name, value):
    options = {"method": method, **others, name: value}
    message = refusal(SpeculationConfig, options)
    assert message.startswith(f"{name} is read with ")
    assert message.endswith("would ignore it: drop it.")
    with pytest.raises(ConfigError, match=f"^{name} is read with "):
        SpeculationConfig.parse(options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        *(
            ({"method": "none"}, name)
            for name in ("num_speculative_tokens", "verification", "max_ngram", "typical_alpha")
        ),
        *(
            ({"method": "draft_model", "model": "m", "verification": rule}, "least_reach")
            for rule in ("rejection", "block")
        ),
    ],
)
def test_parse_refuses_them_as_their_default_too(options, name):
    default = getattr(SpeculationConfig(), name)
    assert SpeculationConfig(**options, **{name: default}).method == options["method"]
    with pytest.raises(ConfigError, match=f"^{name} is read with "):
        SpeculationConfig.parse({**options, name: default})


@pytest.mark.parametrize(
    "options",
    [
        {"method": "none"},
        {"method": "auto", "num_speculative_tokens": 1, "control": "fixed", "store_tokens": 9, "table": "t.npz"},
        {"method": "auto", **NEVER, "width": 2, "verification": "coupled"},
        {"method": "auto", "store_tokens": 9, "verification": "rejection"},
        {"method": "suffix+recycle", "control": "auto"},
        {"method": "ngram", "max_ngram": 1, "min_ngram": 1, "verification": "block"},
        {"method": "ngram", "verification": "typical", "typical_epsilon": 1, "typical_alpha": 1e-9},
        {"method": "draft_model", **NEVER, "verification": "rejection"},
        {"method": "draft_model", "model": "m", "width": 8, "least_reach": 0},
        {"method": "ngram+draft_model", **NEVER, **NGRAM, "num_speculative_tokens": 64},
        {"method": "ngram + a.b:C", "options": {"depth": 3}, "max_ngram": 5},
        {"method": "suffix", "store_tokens": 100, "verification": "block"},
        {"method": "a:C", "verification": "rejection"},
        {"method": "layer_skip", "layers": [0, 1, 5], "verification": "block"},
        {"method": "suffix+layer_skip", "layers": (0,)},
    ],
)
def test_options_that_are_read(options):
    config = SpeculationConfig(**options)
    assert SpeculationConfig.parse(options) == config
    assert EngineConfig(speculation=config).speculation is config


def test_parse():
    assert SpeculationConfig.parse(None) == SpeculationConfig(method="none") == SpeculationConfig.parse(" none ")
    assert SpeculationConfig(method=" auto") == SpeculationConfig(method="auto")
    assert SpeculationConfig(method="suffix + recycle").method == "suffix+recycle"
    assert SpeculationConfig.parse("auto").methods == ("suffix", "recycle")
    assert SpeculationConfig.parse({"method": "auto", "model": "m"}).methods == ("suffix", "recycle", "draft_model")
    assert SpeculationConfig(method="auto", model="m", verification="block").methods == ("draft_model",)
    assert SpeculationConfig.parse(' {"method": "ngram", "max_ngram": 6}').max_ngram == 6
    config = SpeculationConfig(num_speculative_tokens=3)
    assert SpeculationConfig.parse(config) is config
    for wrong, message in (
        ('{"method"', "not valid JSON"),
        ('{"a":' * 3000, "not valid JSON"),
        ('{"max_ngram": ' + "9" * 5000 + "}", "not valid JSON"),
        (3, "must be a name or a JSON object; got 3"),
        (["ngram"], "must be a name or a JSON object"),
        ({"depth": 3, 4: 5}, "has no option 4; it has"),
        ("", "method must be one of"),
    ):
        with pytest.raises(ConfigError, match=message):
            SpeculationConfig.parse(wrong)


@pytest.mark.parametrize(
    ("cls", "name"), [(EngineConfig, "engine"), (EngineConfig, "dtype"), (SpeculationConfig, "method")]
)
def test_arrays_are_no_choice(cls, name):
    assert refusal(cls, {name: np.array([1, 2])}).startswith(f"{name} must be one of ")


def test_lengths_by_default_are_the_methods_own():
    for method, length in (("none", 0), ("ngram", 5), ("suffix", 8), ("suffix+recycle", 8), ("a.b:C", 8)):
        assert SpeculationConfig(method=method).max_draft_tokens == length
    assert SpeculationConfig(method="suffix", num_speculative_tokens=3).max_draft_tokens == 3


def test_entry_points_are_methods(monkeypatch):
    entries = [EntryPoint(name="oracle", value="my.module:Oracle", group="paceline.drafters")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: entries if group == PLUG_INS else [])
    assert SpeculationConfig(method="ngram+oracle", options={"depth": 3}).methods == ("ngram", "oracle")
    assert refusal(SpeculationConfig, {"method": "oracles"}).endswith("got 'oracles': try oracle.")


def test_a_near_miss_names_the_choice():
    assert refusal(SpeculationConfig, {"method": "ngrams"}).endswith("got 'ngrams': try ngram.")


def test_defaults_and_bounds():
    assert CacheConfig(block_size=1, kv_cache_memory=1, prefix_caching=False).block_size == 1
    assert SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1).max_num_seqs == 1
    config = EngineConfig(device="cuda:1", max_model_len=2, num_threads=1)
    assert (config.speculation.method, config.cache, config.scheduler) == ("none", CacheConfig(), SchedulerConfig())


def test_usable_cores(monkeypatch):
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1
