"""Past outputs of all requests, to copy from: the newest ones, in bounded memory."""

from __future__ import annotations

from array import array

from paceline.config import at_least
from paceline.draft.automaton import ROOT, SEPARATOR, SuffixAutomaton, check_integrity, new_automaton


class _Generation:
    """Outputs of one stretch of time. An automaton cannot forget a text, so a generation is dropped as a whole."""

    def __init__(self, max_length: int) -> None:
        self.automaton = new_automaton(max_length=max_length)
        self.outputs: dict[str, tuple[int, int]] = {}  # request id -> tokens of its output stored so far, their hash


class SuffixStore:
    """Outputs of requests that are over, at most `max_tokens` tokens with one separator for each output.

    Two generations hold half of it each; when the newer one is full, the older one goes. Between half and all of
    max_tokens are kept once there are so many, whatever the number of requests; an output longer than half of it is
    cut to its end. Prompts are not stored: they are not what is drafted, and a request has its own at hand.

    max_length: longest string whose occurrences are counted. Raises ConfigError for fewer than 4 tokens.
    """

    def __init__(self, *, max_tokens: int, max_length: int) -> None:
        at_least("store_tokens", max_tokens, 4, example=100_000)
        self._generation_tokens = max_tokens // 2
        self._max_length = max_length
        self._newer = _Generation(max_length)
        self._older = _Generation(max_length)

    @property
    def automata(self) -> list[SuffixAutomaton]:
        """Those that hold anything, the newer first."""
        return [g.automaton for g in (self._newer, self._older) if g.automaton.num_tokens]

    @property
    def num_tokens(self) -> int:
        """Tokens held, separators included."""
        return sum(automaton.num_tokens for automaton in self.automata)

    @property
    def num_states(self) -> int:
        return sum(automaton.num_states for automaton in self.automata)

    def add(self, request_id: str, output_ids: array[int]) -> None:
        """Stores an output. Of one that was stored before, of a request that was preempted, only what is new."""
        new = output_ids[self._num_stored(request_id, output_ids) :][-(self._generation_tokens - 1) :]
        if not new:
            return
        if self._newer.automaton.num_tokens + len(new) + 1 > self._generation_tokens:
            self._older, self._newer = self._newer, _Generation(self._max_length)
        self._newer.automaton.extend([*new, SEPARATOR])
        self._newer.outputs[request_id] = len(output_ids), hash(output_ids.tobytes())

    def check_integrity(self) -> None:
        """Recounts both generations. Raises AssertionError if anything is off."""
        for generation in (self._newer, self._older):
            automaton = generation.automaton
            check_integrity(automaton)
            assert automaton.num_tokens <= self._generation_tokens, f"{automaton.num_tokens} tokens in a generation"
            num_texts = automaton.count(automaton.target(ROOT, SEPARATOR)) if automaton.num_tokens else 0
            assert len(generation.outputs) <= num_texts, f"{len(generation.outputs)} requests in {num_texts} texts"

    def _num_stored(self, request_id: str, output_ids: array[int]) -> int:
        """Tokens at the output's beginning that are stored already; another text under an old id has none."""
        for generation in (self._newer, self._older):
            length, digest = generation.outputs.get(request_id, (0, 0))
            if 0 < length <= len(output_ids) and hash(output_ids[:length].tobytes()) == digest:
                return length
        return 0
