"""Paceline: speculative decoding whose text is the target model's own.

The public names below are imported at first use (PEP 562), so that `import paceline` stays fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import errors
    from paceline.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
    from paceline.llm import LLM
    from paceline.params import Grammar, RequestSpeculation, SamplingParams
    from paceline.types import Completion, Delta, RequestOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CacheConfig",
    "Completion",
    "Delta",
    "EngineConfig",
    "Grammar",
    "RequestOutput",
    "RequestSpeculation",
    "SamplingParams",
    "SchedulerConfig",
    "SpeculationConfig",
    "__version__",
    "errors",
]


def __getattr__(name: str) -> Any:
    match name:
        case "LLM":
            module = "paceline.llm"
        case "CacheConfig" | "EngineConfig" | "SchedulerConfig" | "SpeculationConfig":
            module = "paceline.config"
        case "Grammar" | "RequestSpeculation" | "SamplingParams":
            module = "paceline.params"
        case "Completion" | "Delta" | "RequestOutput":
            module = "paceline.types"
        case "errors":
            return import_module("paceline.errors")
        case _:
            raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
