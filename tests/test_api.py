"""The public surface: names, signatures, types, and what importing it loads."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from importlib import resources

import pytest

import paceline

NAMES = [
    "LLM", "CacheConfig", "Completion", "Delta", "EngineConfig", "Grammar", "RequestOutput", "RequestSpeculation",
    "SamplingParams", "SchedulerConfig", "SpeculationConfig", "__version__", "errors",
]  # fmt: skip
FIELDS = {
    "SamplingParams": [
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "logit_bias", "allowed_token_ids", "banned_token_ids", "min_tokens", "max_tokens", "stop", "stop_token_ids",
        "ignore_eos", "seed", "n", "logprobs", "prompt_logprobs", "skip_special_tokens", "grammar",
        "speculation", "prediction", "step_details",
    ],
    "RequestSpeculation": ["num_speculative_tokens", "method"],
    "EngineConfig": [
        "engine", "dtype", "quantization", "device", "max_model_len", "num_threads", "cache", "scheduler",
        "speculation",
    ],
    "CacheConfig": ["block_size", "kv_cache_memory", "prefix_caching", "kv_cache_dtype"],
    "SchedulerConfig": ["max_num_seqs", "max_num_batched_tokens"],
    "SpeculationConfig": [
        "method", "num_speculative_tokens", "control", "verification", "max_ngram", "min_ngram", "store_tokens",
        "table", "model", "width", "least_reach", "force", "engine", "quantization", "num_threads", "kv_cache_memory",
        "prefix_caching", "layers", "options", "typical_epsilon", "typical_alpha",
    ],
    "Completion": ["index", "text", "token_ids", "finish_reason", "stop_reason", "logprobs", "origins"],
}  # fmt: skip
METHODS = {  # of LLM: parameters that may be given by position, and by keyword only
    "__init__": (["model"], ["config", "speculation", "progress", "trace", "step_details"]),
    "generate": (["prompts", "params"], ["progress"]),
    "chat": (["messages", "params"], ["progress"]),
    "stream": (["prompt", "params"], []),
    "metrics": ([], []),
    "close": ([], []),
}


def test_public_names():
    assert paceline.__all__ == NAMES
    assert dir(paceline) == sorted(NAMES)
    for name in NAMES:
        assert getattr(paceline, name) is not None


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'Beam'"):
        paceline.Beam  # noqa: B018  # the access is what raises


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name):
    cls = getattr(paceline, name)
    assert [field.name for field in dataclasses.fields(cls)] == FIELDS[name]
    assert cls.__dataclass_params__.frozen


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_llm(name):
    parameters = list(inspect.signature(getattr(paceline.LLM, name)).parameters.values())[1:]
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert (by_position, by_keyword) == METHODS[name]


def test_error_tree():
    errors = [c for c in vars(paceline.errors).values() if inspect.isclass(c) and issubclass(c, Exception)]
    errors.remove(paceline.errors.PacelineWarning)
    assert all(issubclass(error, paceline.errors.PacelineError) for error in errors)
    assert issubclass(paceline.errors.ConfigError, ValueError)
    assert issubclass(paceline.errors.PromptError, ValueError)


def test_import_loads_the_standard_library_alone():
    script = "import sys; before = set(sys.modules); import paceline; print(*set(sys.modules) - before)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    assert loaded <= {"paceline"} | sys.stdlib_module_names


def test_types_are_published():
    assert (resources.files("paceline") / "py.typed").is_file()
