"""The decode engine: one step schedules, drafts, computes, verifies and commits."""

from __future__ import annotations

import secrets
import threading
import time
from itertools import count
from typing import NamedTuple

import numpy as np

from paceline.cache.manager import CacheManager
from paceline.config import CacheConfig, SchedulerConfig, at_least
from paceline.control.policy import FixedLength
from paceline.engine import outcome
from paceline.engine.checks import check_drafter, check_grammar, check_prompt, check_tokens
from paceline.engine.drafting import Drafting
from paceline.engine.packing import Rows, pack
from paceline.engine.request import Request, Sequence
from paceline.engine.scheduler import ScheduledSequence, Scheduler
from paceline.errors import ConfigError, GrammarError
from paceline.interfaces import Controller, Drafter, Runner, Tokenizer, Verifier
from paceline.params import SamplingParams
from paceline.sampling.grammar import CompiledGrammar, GrammarCompiler
from paceline.types import (
    Delta,
    Draft,
    ForwardBatch,
    ForwardOutput,
    Observation,
    RowSampling,
    SpeculationMetrics,
    Verdict,
)


class Pass(NamedTuple):
    """A target pass: what went in, what came out, each sequence's rows of it, and its time."""

    batch: ForwardBatch
    output: ForwardOutput
    rows: list[Rows]
    seconds: float


class Engine:
    """Runs requests on a target model, with a drafter in front of it or without.

    The text of a request is a function of (target weights, prompt, sampling parameters, seed) alone when the verifier
    is `coupled`: drafter, draft length, batch and scheduling cannot alter it. `step` is the whole algorithm.

    max_draft_tokens: nodes of a draft. max_predicted_tokens: those of requests with a prediction; None = the same.
    """

    describes_steps = False  # for requests that want step_details

    def __init__(
        self,
        runner: Runner,
        *,
        tokenizer: Tokenizer,
        verifier: Verifier,
        drafter: Drafter | None = None,
        controller: Controller | None = None,
        max_draft_tokens: int = 0,
        max_predicted_tokens: int | None = None,
        scheduler: SchedulerConfig | None = None,
        cache: CacheConfig | None = None,
    ) -> None:
        if drafter is not None:
            at_least("max_draft_tokens", max_draft_tokens, 1)
        self.runner = runner
        self.tokenizer = tokenizer
        self.verifier = verifier
        predicted = max_draft_tokens if max_predicted_tokens is None else max_predicted_tokens
        self.drafting: Drafting | None = None
        if drafter is not None:
            self.drafting = Drafting(
                drafter,
                controller or FixedLength(max(max_draft_tokens, predicted)),
                vocab_size=runner.vocab_size,
                chains_only=verifier.chains_only,
            )
        prefix_caching = (cache or CacheConfig()).prefix_caching
        self.cache = CacheManager(
            num_blocks=runner.kv.num_blocks, block_size=runner.kv.block_size, prefix_caching=prefix_caching
        )
        self.scheduler = Scheduler(
            scheduler or SchedulerConfig(),
            self.cache,
            max_model_len=runner.max_model_len,
            max_draft_tokens=max_draft_tokens if drafter is not None else 0,
            max_predicted_tokens=predicted if drafter is not None else 0,
        )
        self.grammars = GrammarCompiler(tokenizer, vocab_size=runner.vocab_size)
        self.requests: dict[str, Request] = {}  # those that are not finished, by id
        self._plan: list[ScheduledSequence] | None = None  # of the last step; None = it failed to make one
        self._arrivals = count(1)
        self._with_deadline: dict[str, Request] = {}  # those of `requests` that have one
        self._finished = SpeculationMetrics()  # of the requests that are over
        self._counting = threading.Lock()  # a request is either in `requests` or in `_finished` while it is held

    @property
    def drafter(self) -> Drafter | None:
        return None if self.drafting is None else self.drafting.drafter

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def in_step(self) -> list[str]:
        """Ids of the requests that the last step computed for, or tried to: all if it failed before it knew."""
        if self._plan is None:
            return list(self.requests)
        return list(dict.fromkeys(part.sequence.request.id for part in self._plan))

    @property
    def metrics(self) -> SpeculationMetrics:
        """Counted over all requests so far, the running ones included. Safe from any thread."""
        with self._counting:
            requests, finished = self.requests.copy(), self._finished
            running = (s.speculation.freeze() for request in requests.values() for s in request.sequences)
            return sum(running, finished)

    def check_request(self, prompt_token_ids: list[int] | np.ndarray, params: SamplingParams) -> CompiledGrammar | None:
        """The request's grammar, compiled, if it has one. Safe to call from any thread.

        Raises PromptError for a prompt that is empty, beyond the context or holds unknown token ids, ConfigError for
        parameters that name tokens outside the vocabulary, leave no token to sample or choose a drafter that is not
        there; GrammarError for a grammar that cannot be used, MissingDependencyError for one without llguidance.
        """
        if not isinstance(params, SamplingParams):
            raise ConfigError(
                f"params must be SamplingParams; got {type(params).__name__}: SamplingParams(max_tokens=64)."
            )
        vocab_size, eos_ids = self.runner.vocab_size, self.tokenizer.eos_ids
        check_prompt(prompt_token_ids, vocab_size=vocab_size, max_model_len=self.runner.max_model_len)
        check_tokens(params, vocab_size=vocab_size, eos_ids=eos_ids)
        if params.grammar is not None and self.verifier.needs_laws:
            raise GrammarError("a grammar needs the rule coupled, as others would be biased by drafts that it cuts.")
        grammar = None if params.grammar is None else self.grammars.compile(params.grammar)
        if grammar is not None:
            check_grammar(grammar, params, vocab_size=vocab_size, eos_ids=eos_ids)
        if params.step_details and not self.describes_steps:
            raise ConfigError("step_details need LLM(..., step_details=True), whose engine describes its steps.")
        check_drafter(params, () if self.drafter is None else self.drafter.members)
        return grammar

    def add_request(
        self,
        prompt_token_ids: list[int] | np.ndarray,
        params: SamplingParams,
        *,
        prompt: str | None = None,
        stream: bool = False,
        priority: int = 0,
        deadline: float | None = None,
    ) -> str:
        """Queues a request and returns its id. Options and errors are those of `new_request`."""
        request = self.new_request(
            prompt_token_ids, params, prompt=prompt, stream=stream, priority=priority, deadline=deadline
        )
        self.add(request)
        return request.id

    def new_request(
        self,
        prompt_token_ids: list[int] | np.ndarray,
        params: SamplingParams,
        *,
        prompt: str | None = None,
        stream: bool = False,
        priority: int = 0,
        deadline: float | None = None,
    ) -> Request:
        """A request for `add`, numbered as they come. Touches nothing that a step does: safe from any thread.

        priority: lower goes first, in the queue and for K/V blocks. deadline: time.perf_counter() at which
        `abort_overdue` ends it. Raises what `check_request` raises.
        """
        grammar = self.check_request(prompt_token_ids, params)
        return Request(
            next(self._arrivals),
            np.asarray(prompt_token_ids, dtype=np.int32),
            params,
            seed=secrets.randbits(64) if params.seed is None else int(params.seed),
            tokenizer=self.tokenizer,
            eos_ids=self.tokenizer.eos_ids,
            vocab_size=self.runner.vocab_size,
            grammar=grammar,
            prompt=prompt,
            stream=stream,
            priority=priority,
            deadline=deadline,
        )

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.requests[request.id] = request
        if request.deadline is not None:
            self._with_deadline[request.id] = request
        for sequence in request.sequences:
            self.scheduler.add(sequence)

    def abort(self, request_id: str, *, stop_reason: str | None = None) -> list[Delta]:
        """Cancels a request between two steps; the deltas hold what was held back. Empty if it is not running."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        cancelled = [sequence for sequence in request.sequences if sequence.finish_reason is None]
        for sequence in cancelled:
            sequence.finish_reason, sequence.stop_reason = "abort", stop_reason
            if sequence.detokenizer is not None:
                sequence.detokenizer.close()
            self._leave(sequence)
        if not cancelled:  # its last step failed after the output had ended
            self._forget(request)
            return []
        *others, last = cancelled
        return [*(outcome.delta(sequence, []) for sequence in others), self._last_delta(last, token_ids=[])]

    def abort_overdue(self) -> list[Delta]:
        """Cancels, between two steps, the requests whose deadline is over; their stop_reason is "deadline"."""
        if not self._with_deadline:
            return []
        now = time.perf_counter()
        overdue = [r.id for r in self._with_deadline.values() if r.deadline is not None and now >= r.deadline]
        return [delta for request_id in overdue for delta in self.abort(request_id, stop_reason="deadline")]

    def discard(self, request_id: str) -> None:
        """Drops a request that a failed step left in any state, without an output. Unknown ones are ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            for sequence in request.sequences:
                self.scheduler.remove(sequence)
                self._release_draft(sequence)
            self._forget(request)

    def step(self) -> list[Delta]:
        """One target pass. Returns what it added to streamed requests, and the last delta of every finished one."""
        plan = self._schedule()
        if not plan:
            return []
        try:
            self._copy_blocks(plan)
            drafts = self._constrain(plan, self._propose(plan))
            passed = self._forward(plan, drafts)
            verdicts = self._verify(plan, drafts, passed)
            return self._commit(plan, drafts, verdicts, passed)
        finally:
            self.scheduler.roll_back(plan)

    def check_integrity(self) -> None:
        """Recounts the cache and what each sequence says of it. Raises AssertionError if anything is off."""
        self.cache.check_integrity()
        for sequence in self.scheduler.running:
            held = len(self.cache.block_table(sequence.id)) * self.cache.block_size
            assert sequence.num_computed <= held, (
                f"{sequence.id}: {sequence.num_computed} tokens computed, {held} slots held"
            )
            assert sequence.num_computed < len(sequence.tokens), f"{sequence.id}: nothing pending"
        for sequence in self.scheduler.waiting:
            assert sequence.num_computed == 0, (
                f"{sequence.id} waits, but counts {sequence.num_computed} computed tokens"
            )

    def _schedule(self) -> list[ScheduledSequence]:
        self._plan = None
        self._plan, preempted = self.scheduler.schedule()
        for sequence in preempted:
            self._release_draft(sequence)
        return self._plan

    def _copy_blocks(self, plan: list[ScheduledSequence]) -> None:
        """Blocks that sequences shared become their own before anything, a drafter included, writes or fails."""
        copies = [copy for part in plan for copy in part.copies]
        if copies:
            self.runner.move(*self.cache.copy_slots(copies))

    def _propose(self, plan: list[ScheduledSequence]) -> list[Draft | None]:
        return [None] * len(plan) if self.drafting is None else self.drafting.propose(plan, self.cache)

    def _constrain(self, plan: list[ScheduledSequence], drafts: list[Draft | None]) -> list[Draft | None]:
        """Drafts without what a grammar rules out; each part gets the masks of its rows."""
        return [part.constrain(draft) for part, draft in zip(plan, drafts, strict=True)]

    def _forward(self, plan: list[ScheduledSequence], drafts: list[Draft | None]) -> Pass:
        told = self.drafter if self.drafting is not None and self.drafting.tells else None
        batch, sampling, rows = pack(
            plan,
            drafts,
            self.cache,
            want_laws=self.verifier.needs_laws,
            hidden_layers=told.hidden_layers if told is not None else (),
            num_successors=told.num_successors if told is not None else 0,
        )
        start = time.perf_counter()
        output = self._compute(batch, sampling)
        return Pass(batch, output, rows, time.perf_counter() - start)

    def _compute(self, batch: ForwardBatch, sampling: RowSampling | None) -> ForwardOutput:
        return self.runner.forward(batch, sampling)

    def _verify(self, plan: list[ScheduledSequence], drafts: list[Draft | None], passed: Pass) -> list[Verdict | None]:
        """Which nodes are kept, and the token after them; None for prompts that are not through."""
        verdicts: list[Verdict | None] = []
        output = passed.output
        values = output.laws if self.verifier.needs_laws else output.token_ids
        for part, draft, where in zip(plan, drafts, passed.rows, strict=True):
            if not part.samples:
                verdicts.append(None)
            elif draft is None:
                assert output.token_ids is not None
                verdicts.append(Verdict((), int(output.token_ids[where.sample.start]), "bonus"))
            else:
                assert values is not None
                sequence = part.sequence
                verdicts.append(
                    self.verifier.verify(
                        draft,
                        values[where.sample],
                        sequence.noise,
                        position=len(sequence.tokens),
                        attempt=sequence.speculation.steps,
                    )
                )
        return verdicts

    def _commit(
        self,
        plan: list[ScheduledSequence],
        drafts: list[Draft | None],
        verdicts: list[Verdict | None],
        passed: Pass,
    ) -> list[Delta]:
        """Tokens appended up to their stop, accepted K/V moved into place, metrics counted."""
        if self.drafting is not None and not self.drafting.tells:
            self.drafting.passed(drafts, passed.seconds)
        elif self.drafting is not None:
            self.drafting.observe(
                Observation(
                    views=tuple(part.view(self.cache) for part in plan),
                    drafts=tuple(drafts),
                    verdicts=tuple(verdicts),
                    hidden=passed.output.hidden,
                    starts=passed.batch.query_starts,
                    successors=_successors(passed),
                    seconds=passed.seconds,
                )
            )
        deltas: list[Delta] = []
        output = passed.output
        for part, draft, verdict, where in zip(plan, drafts, verdicts, passed.rows, strict=True):
            sequence = part.sequence
            outcome.note_prompt_logprobs(sequence, output, where)
            if verdict is None:
                sequence.num_computed += part.num_tokens
                continue
            self._move_path(sequence, verdict.path, first_node=sequence.num_computed + part.num_tokens)
            token_ids = outcome.extend(
                part, draft, verdict, output=output, rows=where, max_model_len=self.runner.max_model_len
            )
            if sequence.finish_reason is not None:
                self._leave(sequence)
            if sequence.finish_reason is not None and sequence.request.finished:
                deltas.append(self._last_delta(sequence, token_ids=token_ids))
            elif sequence.request.stream:
                deltas.append(outcome.delta(sequence, token_ids))
        return deltas

    def _move_path(self, sequence: Sequence, path: tuple[int, ...], *, first_node: int) -> None:
        """Accepted nodes take the key indices that plain decoding would have given them."""
        if path == tuple(range(len(path))):
            return
        slots = self.cache.slots(sequence.id, first_node, max(path) + 1)
        self.runner.move(slots[list(path)], slots[: len(path)])

    def _leave(self, sequence: Sequence) -> None:
        """A finished or cancelled sequence gives back its blocks; its full blocks stay findable until evicted."""
        if sequence in self.scheduler.running:
            self.cache.commit(sequence.id, sequence.tokens.view(), sequence.num_computed)
        self.scheduler.remove(sequence)
        self._release_draft(sequence)

    def _release_draft(self, sequence: Sequence) -> None:
        if self.drafting is not None:
            self.drafting.release(sequence.id)

    def _last_delta(self, sequence: Sequence, *, token_ids: list[int]) -> Delta:
        request = sequence.request
        self._forget(request)
        output = request.output(lossless=self.verifier.lossless, coupled=not self.verifier.needs_laws)
        return outcome.delta(sequence, token_ids, output=output)

    def _forget(self, request: Request) -> None:
        with self._counting:
            del self.requests[request.id]
            self._finished = sum((s.speculation.freeze() for s in request.sequences), self._finished)
        self._with_deadline.pop(request.id, None)


def _successors(passed: Pass) -> list[np.ndarray | None]:
    """Each sequence's own rows of the pass's successors; None where it sampled nothing, or nobody asked."""
    found = passed.output.successors
    if found is None:
        return [None] * len(passed.rows)
    return [found[own.sample] if own.sample.stop > own.sample.start else None for own in passed.rows]
