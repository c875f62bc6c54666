"""Self-speculation: the target drafts for itself with some of its layers left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.draft.row_sampling import NextRow, SamplingState, sample_next
from paceline.errors import ConfigError
from paceline.interfaces import Drafter, Runner
from paceline.types import Draft, DraftLaw, ForwardBatch, RequestView


@dataclass(slots=True)
class _Job:
    """One request's part of a call of propose: known tokens, then drafted ones, of which some are computed."""

    view: RequestView
    state: SamplingState
    table: np.ndarray  # [blocks] int32
    tokens: np.ndarray  # [known + to be drafted] int32
    num_computed: int
    length: int  # known + drafted so far
    laws: list[np.ndarray] = field(default_factory=list)  # [V] of each drafted token

    @property
    def drafted(self) -> np.ndarray:
        return self.tokens[len(self.view.token_ids) : self.length]


class LayerSkipDrafter(Drafter):
    """Proposes a chain that the target's own `layers` sampled with the request's parameters.

    No second copy of anything: the passes read the target's weights, and the K/V that its passes left of every known
    token. What they compute themselves, they write where the target's pass over this draft writes its own right after
    them; a draft that is not verified leaves nothing that counts as computed. Drafting again and again from exact K/V
    keeps errors from adding up. (Draft & Verify, 2309.08168; LayerSkip, 2404.16710, where the layers are the first.)

    runner: the target's. layers: those that run, ascending. rule_needs_law: the rule wants to know what the tokens were
    sampled from (`rejection`, `block`); otherwise they are drawn with the target's own noise. eos_ids: the tokens that
    min_tokens bans.
    """

    name = "layer_skip"
    serial = True
    catches_up = True

    def __init__(
        self,
        runner: Runner,
        *,
        layers: Sequence[int],
        rule_needs_law: bool,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._runner = runner
        self.layers = tuple(layers)
        self._rule_needs_law = rule_needs_law
        self._eos_ids = eos_ids
        self._states: dict[str, SamplingState] = {}

    def propose(self, views: Sequence[RequestView], budgets: Sequence[int]) -> list[Draft | None]:
        jobs = [self._begin(view, budget) for view, budget in zip(views, budgets, strict=True)]
        while unfinished := [job for job in jobs if job.length < len(job.tokens)]:
            self._run(unfinished)
        return [self._finish(job) for job in jobs]

    def release(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    def _begin(self, view: RequestView, budget: int) -> _Job:
        assert view.block_table is not None, "layer_skip reads the K/V of the target, whose table the view lacks"
        state = self._states.get(view.request_id)
        if state is None:
            state = SamplingState(view, eos_ids=self._eos_ids, vocab_size=self._runner.vocab_size)
            self._states[view.request_id] = state
        known = len(view.token_ids)
        state.follow(view.token_ids)
        tokens = np.empty(known + budget, dtype=np.int32)
        tokens[:known] = view.token_ids
        return _Job(view, state, view.block_table, tokens, view.num_computed, known)

    def _run(self, jobs: list[_Job]) -> None:
        """One pass over what is pending; samples the next token of each job."""
        rows = [NextRow(job.view, job.state, job.drafted) for job in jobs]
        output = self._runner.forward(self._pack(jobs), sample_next(rows, rule_needs_law=self._rule_needs_law))
        assert output.token_ids is not None
        for row, job in enumerate(jobs):
            job.num_computed = job.length
            job.tokens[job.length] = output.token_ids[row]
            job.length += 1
            if self._rule_needs_law:
                assert output.laws is not None
                job.laws.append(output.laws[row])

    def _pack(self, jobs: list[_Job]) -> ForwardBatch:
        size = self._runner.kv.block_size
        keys = [np.arange(job.num_computed, job.length, dtype=np.int32) for job in jobs]
        ends = np.cumsum([len(own) for own in keys])
        return ForwardBatch(
            token_ids=np.concatenate([job.tokens[job.num_computed : job.length] for job in jobs]),
            positions=np.concatenate(keys),
            slots=np.concatenate(
                [job.table[own // size] * np.int64(size) + own % size for job, own in zip(jobs, keys, strict=True)]
            ),
            query_starts=np.concatenate([[0], ends]).astype(np.int32),
            context_lengths=np.array([job.num_computed for job in jobs], dtype=np.int32),
            block_tables=[job.table for job in jobs],
            ancestors=[None] * len(jobs),
            logit_rows=(ends - 1).astype(np.int32),
            layers=self.layers,
        )

    def _finish(self, job: _Job) -> Draft:
        law = DraftLaw(np.stack(job.laws)) if self._rule_needs_law else None
        return Draft.chain(job.drafted, source=self.name, law=law)


def check_layers(layers: Sequence[int], *, num_layers: int) -> None:
    """Raises ConfigError unless all `layers` are among the model's, and some are left out."""
    if max(layers) >= num_layers:
        raise ConfigError(
            f"layers must be from 0 to {num_layers - 1}, which are the target's; got {max(layers)}: drop it."
        )
    if len(layers) == num_layers:
        raise ConfigError(f"layers keeps all {num_layers} of the target, which gains nothing: leave some out.")


def default_layers(num_layers: int) -> tuple[int, ...]:
    """All but the middle third: what runs where nothing was tuned. A run of layers in the middle is missed far less
    than as many layers here and there (docs/design-notes.md)."""
    third = max(1, num_layers // 3)
    return tuple(i for i in range(num_layers) if not third <= i < 2 * third)
