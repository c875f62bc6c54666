"""What an engine tells those who watch it: a snapshot of its state, and a record of each request that ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.types import RequestOutput, SpeculationMetrics


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine at one moment; what is not a state of that moment counts from its beginning."""

    num_running: int  # choices that are part of the steps
    num_waiting: int  # choices that are not, preempted ones included
    kv_cache_usage: float  # share of the blocks that running choices hold, 0..1
    num_prompt_tokens: int  # of requests whose first token has come
    num_generation_tokens: int
    num_prefix_cache_queries: int  # prompt tokens looked up in the prefix cache
    num_prefix_cache_hits: int  # those of them whose K/V was there
    num_preemptions: int
    finished: Mapping[str, int]  # choices by the reason of their end: stop, length, abort, error
    num_drafter_errors: int  # calls of the drafter that raised, or proposed what does not fit
    speculation: SpeculationMetrics


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """The times of one request that ended, in whichever way. A part that it never came to is None."""

    output: RequestOutput | None  # None where a step failed
    num_prompt_tokens: int
    num_generation_tokens: int
    queue_seconds: float | None  # from its arrival to its first step
    first_token_seconds: float | None  # from its arrival to its first output token
    seconds: float  # from its arrival to its end
    # (tokens, seconds each) of each step after a choice's first: a step of three tokens after 30 ms is (3, 0.01)
    inter_token_seconds: tuple[tuple[int, float], ...]
