"""An engine that writes down what each step did. The plain one knows nothing of it, and pays nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from paceline.engine.detokenizer import Detokenizer
from paceline.engine.engine import Engine, Pass
from paceline.engine.packing import Rows
from paceline.engine.request import Request, Sequence
from paceline.engine.scheduler import ScheduledSequence
from paceline.engine.trace import TraceFile, TraceNode, TraceRequest, TraceSample, TraceStep, TraceToken
from paceline.interfaces import Runner
from paceline.sampling.sampler import raw_logprobs
from paceline.types import Delta, Draft, ForwardBatch, ForwardOutput, RowSampling, Verdict


class TracedEngine(Engine):
    """An Engine whose steps are described: all in a trace file, where there is one, and in the deltas of the requests
    that want step_details. Ids and log-probabilities are the same.

    For a pass with such requests it asks the runner for the raw logits of every row on top, which the time of its
    forward passes includes. The other options are Engine's. `step` raises OSError, after the step, where the file can
    no longer be written.
    """

    describes_steps = True

    def __init__(self, runner: Runner, *, trace: TraceFile | None = None, **options: Any) -> None:
        super().__init__(runner, **options)
        self._describing = False  # a request of this pass
        self._trace = trace
        self._num_passes = 0
        self._milliseconds: dict[str, float] = {}
        self._logits: np.ndarray | None = None  # [M, V] of the pass
        self._texts: WeakKeyDictionary[Sequence, Detokenizer] = WeakKeyDictionary()
        self._described: WeakKeyDictionary[Request, bool] = WeakKeyDictionary()

    def _propose(self, plan: list[ScheduledSequence]) -> list[Draft | None]:
        with self._timed("draft"):
            return super()._propose(plan)

    def _forward(self, plan: list[ScheduledSequence], drafts: list[Draft | None]) -> Pass:
        self._describing = any(self._describes(part.sequence) for part in plan)
        with self._timed("forward"):
            return super()._forward(plan, drafts)

    def _compute(self, batch: ForwardBatch, sampling: RowSampling | None) -> ForwardOutput:
        if sampling is None or not self._describing:
            return super()._compute(batch, sampling)
        output = super()._compute(batch, replace(sampling, want_logits=True))
        self._logits = output.logits
        return output if sampling.want_logits else replace(output, logits=None)

    def _verify(self, plan: list[ScheduledSequence], drafts: list[Draft | None], passed: Pass) -> list[Verdict | None]:
        with self._timed("verify"):
            return super()._verify(plan, drafts, passed)

    def _commit(
        self,
        plan: list[ScheduledSequence],
        drafts: list[Draft | None],
        verdicts: list[Verdict | None],
        passed: Pass,
    ) -> list[Delta]:
        positions = [len(part.sequence.tokens) for part in plan]
        roots = [int(part.sequence.tokens.view()[-1]) for part in plan]
        with self._timed("commit"):
            deltas = super()._commit(plan, drafts, verdicts, passed)
        self._num_passes += 1
        steps: dict[tuple[str, int], TraceStep] = {}
        for i, part in enumerate(plan):
            sequence = part.sequence
            if not self._describes(sequence):
                continue
            drafted = self._drafted(drafts[i], verdicts[i], passed.output, passed.rows[i], root=roots[i])
            num_kept = len(sequence.tokens) - positions[i]
            if num_kept <= len(drafted["path"]):  # the output ended within it
                drafted |= {"path": drafted["path"][:num_kept], "final": None, "kind": None}
            step = self._line(part, positions[i], drafted)
            if self._trace is not None:
                self._trace.write(*self._opening(sequence.request), step)
            if sequence.params.step_details:
                steps[sequence.request.id, sequence.index] = step
        return [
            replace(d, steps=(steps[d.request_id, d.index],)) if (d.request_id, d.index) in steps else d for d in deltas
        ]

    def _describes(self, sequence: Sequence) -> bool:
        return self._trace is not None or sequence.params.step_details

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._milliseconds[stage] = round(1e3 * (time.perf_counter() - start), 4)

    def _opening(self, request: Request) -> tuple[TraceRequest, ...]:
        """The request's own line, before its first step."""
        if request in self._described:
            return ()
        self._described[request] = True
        prompt_ids = tuple(request.prompt_token_ids.tolist())
        return (TraceRequest(request.id, request.prompt, prompt_ids, request.seed, asdict(request.params)),)

    def _line(self, part: ScheduledSequence, position: int, drafted: dict[str, Any]) -> TraceStep:
        sequence = part.sequence
        return TraceStep(
            step=self._num_passes,
            request_id=sequence.request.id,
            choice=sequence.index,
            position=position,
            num_pending=part.num_tokens,
            tokens=self._tokens(sequence, position),
            finish_reason=sequence.finish_reason,
            milliseconds=dict(self._milliseconds),
            **drafted,
        )

    def _drafted(
        self, draft: Draft | None, verdict: Verdict | None, output: ForwardOutput, rows: Rows, *, root: int
    ) -> dict[str, Any]:
        """Nodes, samples, path and final token of a TraceStep."""
        if verdict is None:
            return {"nodes": (), "samples": (), "path": (), "final": None, "kind": None}
        drafted, parents = ([], []) if draft is None else (draft.token_ids.tolist(), draft.parents.tolist())
        before = [root, *drafted]  # the token of each row
        sampled: list[int] = []
        if not self.verifier.needs_laws:
            assert output.token_ids is not None
            sampled = output.token_ids[rows.sample].tolist()
        last = 1 + verdict.path[-1] if verdict.path else 0
        # Each token that is reported, and the row that it comes after: samples, nodes, final token
        after = np.array([*range(len(sampled)), *(1 + parent for parent in parents), last])
        token_ids = [*sampled, *drafted, verdict.final_token]
        assert self._logits is not None
        logprobs = raw_logprobs(self._logits[rows.sample][after], np.array(token_ids, np.int32), num_logprobs=0).token
        described = [
            TraceSample(token_id, self._piece(before[row], token_id), _rounded(logprob))
            for token_id, row, logprob in zip(token_ids, after.tolist(), logprobs.tolist(), strict=True)
        ]
        nodes = []
        for node, (parent, found) in enumerate(zip(parents, described[len(sampled) : -1], strict=True)):
            assert draft is not None
            confidence = None if draft.confidence is None else _rounded(float(draft.confidence[node]))
            names = (draft.source,) if draft.proposers is None else draft.proposers[node]
            nodes.append(TraceNode(found.token_id, found.text, parent, names, confidence, found.logprob))
        return {
            "nodes": tuple(nodes),
            "samples": tuple(described[: len(sampled)]),
            "path": verdict.path,
            "final": described[-1],
            "kind": "plain" if draft is None else verdict.kind,
        }

    def _tokens(self, sequence: Sequence, position: int) -> tuple[TraceToken, ...]:
        if sequence not in self._texts:
            self._texts[sequence] = Detokenizer(self.tokenizer, skip_special_tokens=False)
        detokenizer = self._texts[sequence]
        token_ids = sequence.tokens.view()[position:].tolist()
        pieces = []
        for token_id in token_ids:
            detokenizer.append([token_id])
            pieces.append(detokenizer.take())
        if sequence.finish_reason is not None and pieces:
            detokenizer.close()
            pieces[-1] += detokenizer.take()
        origins = sequence.origins[len(sequence.origins) - len(token_ids) :]
        return tuple(map(TraceToken, token_ids, pieces, origins))

    def _piece(self, before: int, token_id: int) -> str:
        """What a token adds to the text of the one before it: alone, some tokens decode without their space."""
        known = self.tokenizer.decode([before], skip_special_tokens=False)
        grown = self.tokenizer.decode([before, token_id], skip_special_tokens=False)
        if grown.startswith(known):
            return grown[len(known) :]
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


def _rounded(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None
