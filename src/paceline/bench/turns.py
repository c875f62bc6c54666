"""Many requests at once on two engines that take turns, so that both meet the same machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.bench.workload import Prompt
from paceline.params import SamplingParams
from paceline.types import RequestOutput

if TYPE_CHECKING:
    from paceline.llm import LLM

_TURN_SECONDS = 0.25  # a dozen steps or so: long beside what a change costs, short beside a neighbour's work


class Turns:
    """An engine with all prompts at once, and a clock that stands still while it is not its turn."""

    def __init__(
        self, llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, *, turn_seconds: float = _TURN_SECONDS
    ) -> None:
        self.seconds = 0.0  # by that clock
        self._turn_seconds = turn_seconds
        self._engine = llm.engine
        self._prompts = {self._engine.add_request(_token_ids(llm, p), params): p for p in prompts}
        self._pauses: list[tuple[float, float]] = []
        self._paused_at = time.perf_counter()

    @property
    def finished(self) -> bool:
        return not self._engine.has_unfinished

    def take(self) -> list[tuple[Prompt, RequestOutput]]:
        """Steps for a turn's time. Returns what finished, with times by the own clock."""
        start = now = time.perf_counter()
        self._pauses.append((self._paused_at, start))
        finished: list[tuple[Prompt, RequestOutput]] = []
        while self._engine.has_unfinished and (now == start or now - start < self._turn_seconds):
            outputs = [delta.output for delta in self._engine.step() if delta.output is not None]
            now = time.perf_counter()
            finished += [(self._prompts[o.request_id], self._by_own_clock(o, now)) for o in outputs]
        self._paused_at = now
        self.seconds += now - start
        return finished

    def _by_own_clock(self, output: RequestOutput, now: float) -> RequestOutput:
        first_token = now - output.decode_seconds
        scheduled = first_token - output.prefill_seconds
        return replace(
            output,
            prefill_seconds=self._running(scheduled, first_token),
            decode_seconds=self._running(first_token, now),
        )

    def _running(self, start: float, end: float) -> float:
        """Seconds between two points of time, without the pauses."""
        return end - start - sum(max(0.0, min(to, end) - max(since, start)) for since, to in self._pauses)


def _token_ids(llm: LLM, prompt: Prompt) -> list[int]:
    tokenizer = llm.tokenizer
    if not tokenizer.has_chat_template:
        return tokenizer.encode(prompt.turns[0])
    return tokenizer.encode_chat(prompt.messages)
