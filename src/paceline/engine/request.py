"""What the engine knows of a request: its choices, their tokens, and how far each is computed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from paceline.engine.detokenizer import Detokenizer
from paceline.interfaces import Tokenizer
from paceline.params import SamplingParams
from paceline.sampling.grammar import CompiledGrammar
from paceline.sampling.grammar_state import GrammarState
from paceline.sampling.noise import SAMPLE, PhiloxNoise
from paceline.sampling.processors import PenaltyState, allowed_mask
from paceline.types import Completion, Draft, FinishReason, RequestOutput, RequestView, SpeculationMetrics, TokenLogprob

_MANY_ROWS = 64  # of a sequence in one pass; more come once, with a prompt's log-probabilities


class TokenBuffer:
    """A growable int32 array: appending is amortised O(1), reading is a view."""

    def __init__(self, token_ids: np.ndarray) -> None:
        self._length = 0
        self._reserve(max(64, 2 * len(token_ids)))
        self._data[: len(token_ids)] = token_ids
        self._length = len(token_ids)

    def __len__(self) -> int:
        return self._length

    def extend(self, token_ids: list[int]) -> None:
        end = self._length + len(token_ids)
        if end > len(self._data):
            self._reserve(2 * end)
        self._data[self._length : end] = token_ids
        self._length = end

    def view(self) -> np.ndarray:
        """[len] int32, read-only; a later extend leaves it as it is."""
        return self._read_only[: self._length]

    def _reserve(self, size: int) -> None:
        grown = np.empty(size, dtype=np.int32)
        if self._length:
            grown[: self._length] = self._data[: self._length]
        self._data, self._read_only = grown, grown.view()
        self._read_only.flags.writeable = False  # and so are its slices


@dataclass(slots=True)
class SpeculationCounter:
    """SpeculationMetrics while they are being counted."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    num_accepted: list[int] = field(default_factory=list)  # drafts of which exactly i nodes were accepted
    drafted_by: dict[str, int] = field(default_factory=dict)  # nodes by drafter's name
    accepted_by: dict[str, int] = field(default_factory=dict)

    def count(self, draft: Draft | None, accepted: tuple[int, ...]) -> None:
        """One step, in which these nodes of the draft were accepted."""
        self.steps += 1
        if draft is None:
            return
        self.drafts += 1
        self.draft_tokens += len(draft)
        self.accepted_tokens += len(accepted)
        if len(accepted) >= len(self.num_accepted):
            self.num_accepted += [0] * (len(accepted) + 1 - len(self.num_accepted))
        self.num_accepted[len(accepted)] += 1
        if draft.proposers is None:
            _add(self.drafted_by, draft.source, len(draft))
            _add(self.accepted_by, draft.source, len(accepted))
            return
        for node, names in enumerate(draft.proposers):
            for name in names:
                _add(self.drafted_by, name, 1)
                _add(self.accepted_by, name, node in accepted)

    def freeze(self) -> SpeculationMetrics:
        per_pos = tuple(sum(self.num_accepted[i:]) for i in range(1, len(self.num_accepted)))
        return SpeculationMetrics(
            self.drafts,
            self.draft_tokens,
            self.accepted_tokens,
            per_pos,
            self.steps,
            dict(self.drafted_by),
            dict(self.accepted_by),
        )


def _add(counts: dict[str, int], name: str, count: int) -> None:
    counts[name] = counts.get(name, 0) + count


class Sequence:
    """One choice of one request: prompt + output, of which the first num_computed tokens have K/V in the cache."""

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index  # the choice among n, and the noise's stream
        self.id = f"{request.id}/{index}"
        self.rank = (request.priority, request.arrival + index, index)  # whose is lower goes first (scheduler.py)
        self.params = request.params
        self.tokens = TokenBuffer(request.prompt_token_ids)
        self.prompt_length = len(request.prompt_token_ids)
        self.num_computed = 0
        self.penalties = PenaltyState(
            request.params, request.prompt_token_ids, eos_ids=request.eos_ids, vocab_size=request.vocab_size
        )
        eos_ids = frozenset() if request.params.ignore_eos else request.eos_ids
        self.ends = eos_ids | set(request.params.stop_token_ids)  # tokens that end the output
        self.allowed = allowed_mask(request.params, vocab_size=request.vocab_size)  # [ceil(V/8)] uint8, None = all
        self.grammar = request.new_grammar_state()
        self.noise = PhiloxNoise(request.seed, index)
        self._row_constants: dict[int, tuple[np.ndarray, ...]] = {}
        self.detokenizer: Detokenizer | None = request.new_detokenizer()
        self.origins: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.speculation = SpeculationCounter()
        self.lengths_fixed = True  # every draft had the length that the settings alone give
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens = 0
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """Known tokens whose K/V is not in the cache yet."""
        return len(self.tokens) - self.num_computed

    @property
    def wants_prompt_rows(self) -> bool:
        """Some prompt tokens still lack the log-probabilities that were asked for (choices share the first's)."""
        wanted = self.params.prompt_logprobs is not None and self.index == 0
        return wanted and len(self.prompt_logprobs) < self.prompt_length - 1

    def output_ids(self) -> np.ndarray:
        return self.tokens.view()[self.prompt_length :]

    def view(self, block_table: np.ndarray) -> RequestView:
        return RequestView(
            self.id,
            self.tokens.view(),
            self.prompt_length,
            self.params,
            self.request.seed,
            self.index,
            self.speculation.steps,
            self.num_computed,
            block_table,
        )

    def row_constants(self, count: int) -> tuple[np.ndarray, ...]:
        """What RowSampling has for each of its rows, up to the position: temperature, top_k, top_p, min_p, seed, stream
        and purpose, each [count] and to be read only. Few counts come again and again."""
        constants = self._row_constants.get(count)
        if constants is None:
            params = self.params
            columns = (
                (params.temperature, np.float32),
                (params.top_k, np.int32),
                (params.top_p, np.float32),
                (params.min_p, np.float32),
                (self.request.seed, np.uint64),
                (self.index, np.uint32),
                (SAMPLE, np.uint32),
            )
            constants = tuple(np.full(count, value, dtype) for value, dtype in columns)
            for values in constants:
                values.flags.writeable = False
            if count <= _MANY_ROWS:
                self._row_constants[count] = constants
        return constants

    def append(self, token_ids: list[int]) -> None:
        """Makes tokens known; their K/V is pending."""
        self.tokens.extend(token_ids)
        if self.penalties.active:
            self.penalties.append(token_ids)
        if self.grammar is not None:
            self.grammar.append(token_ids)

    def note_scheduled(self) -> None:
        """Marks the first time that the sequence is part of a step."""
        self.scheduled_at = time.perf_counter()
        self.num_cached_tokens = self.num_computed

    def note_tokens(self) -> None:
        """Marks the time at which output tokens arrived."""
        self.last_token_at = time.perf_counter()
        if self.first_token_at is None:
            self.first_token_at = self.last_token_at

    def completion(self) -> Completion:
        output_ids = tuple(self.output_ids().tolist())
        return Completion(
            index=self.index,
            text=self.request.text_of(self),
            token_ids=output_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs) if self.params.logprobs is not None else None,
            origins=tuple(self.origins),
        )


class Request:
    """A prompt with its sampling parameters, and the n choices that grow from it."""

    def __init__(
        self,
        arrival: int,
        prompt_token_ids: np.ndarray,
        params: SamplingParams,
        *,
        seed: int,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int],
        vocab_size: int,
        grammar: CompiledGrammar | None,
        prompt: str | None = None,
        stream: bool = False,
        priority: int = 0,
        deadline: float | None = None,
    ) -> None:
        self.id = str(arrival)
        self.arrival = arrival  # requests are numbered as they come
        self.priority = priority  # lower goes first
        self.deadline = deadline  # time.perf_counter() at which it ends; None = never
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.seed = seed
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.vocab_size = vocab_size
        self.grammar = grammar
        self.stream = stream
        self.sequences = [Sequence(self, index) for index in range(params.n)]

    def new_detokenizer(self) -> Detokenizer | None:
        """Text is needed step by step only to stream it or to find stop strings in it."""
        if not (self.stream or self.params.stop):
            return None
        return Detokenizer(self.tokenizer, skip_special_tokens=self.params.skip_special_tokens, stop=self.params.stop)

    def new_grammar_state(self) -> GrammarState | None:
        if self.grammar is None:
            return None
        return GrammarState(self.grammar, self.params, eos_ids=self.eos_ids, vocab_size=self.vocab_size)

    def text_of(self, sequence: Sequence) -> str:
        if sequence.detokenizer is not None:
            return sequence.detokenizer.text
        output_ids = sequence.output_ids().tolist()
        if output_ids and output_ids[-1] in sequence.ends:  # the token that ended the output is not part of the text
            output_ids = output_ids[:-1]
        return self.tokenizer.decode(output_ids, skip_special_tokens=self.params.skip_special_tokens)

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def output(self, *, lossless: bool, coupled: bool) -> RequestOutput:
        first = self.sequences[0]
        metrics = sum((s.speculation.freeze() for s in self.sequences), SpeculationMetrics())
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = (None, *first.prompt_logprobs)
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=tuple(self.prompt_token_ids.tolist()),
            outputs=tuple(s.completion() for s in self.sequences),
            seed=self.seed,
            finished=self.finished,
            lossless=lossless,
            reproducible=coupled or all(s.lengths_fixed for s in self.sequences),
            metrics=metrics,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
            prefill_seconds=_span(first.scheduled_at, first.first_token_at),
            decode_seconds=_span(first.first_token_at, max(s.last_token_at or 0.0 for s in self.sequences)),
        )


def _span(start: float | None, end: float | None) -> float:
    return max(0.0, end - start) if start and end else 0.0
