"""Drafting with a smaller model: it writes ahead, one token a pass for all requests together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.cache.manager import CacheManager
from paceline.draft.draft_pass import (
    NUM_CANDIDATES,
    Candidates,
    DraftJob,
    DraftState,
    Part,
    next_parts,
    pack,
)
from paceline.draft.draft_tree import DraftTree, next_trees, pack_trees
from paceline.draft.row_sampling import NextRow, SamplingState, sample_next
from paceline.draft.shared_vocabulary import DraftVocabulary, SharedVocabulary
from paceline.interfaces import Drafter, Runner
from paceline.types import Draft, DraftLaw, RequestView, RowSampling


class DraftModelDrafter(Drafter):
    """Proposes a chain that the draft model sampled with the request's own parameters, or a tree of what nearly was.

    A draft ends where the target is not likely to come so far (draft_pass.Candidates tells how that is judged).

    The model has its own K/V cache, which follows each request: what verification dropped is rolled back, what the
    model has not seen yet is caught up in chunks together with the drafting of others. A request that does not fit into
    the model's context or cache gets no draft.

    vocabulary: how the model's tokens and the target's belong together; None = they are the same.
    rule_needs_law: the rule wants to know what the tokens were sampled from (`rejection`, `block`), so they are drawn
    with words of their own. Otherwise they are drawn with the very noise the target uses, which makes the two agree
    most often, and allows trees and drafts that end early. width: children of a node; 1 = a chain. least_reach: chance
    with which a node must be reached to be drafted; a pass that drafts it and its row in the target's take a tenth to a
    third of a pass over one token. eos_ids: the target's tokens that min_tokens bans.
    """

    name = "draft_model"
    catches_up = True

    def __init__(
        self,
        runner: Runner,
        *,
        vocabulary: DraftVocabulary | None = None,
        rule_needs_law: bool,
        width: int = 1,
        least_reach: float = 0.2,
        prefix_caching: bool = False,
        eos_ids: frozenset[int] = frozenset(),
        max_num_batched_tokens: int = 512,
    ) -> None:
        self._runner = runner
        size = runner.vocab_size
        self._vocabulary = vocabulary or SharedVocabulary(target_size=size, own_size=size)
        assert width == 1 or not rule_needs_law, "rules on laws take chains"
        self.note = self._vocabulary.note
        self._rule_needs_law = rule_needs_law
        self._width = width
        self.serial = width == 1
        self._least_reach = least_reach
        self._eos_ids = eos_ids
        self._max_num_batched_tokens = max_num_batched_tokens
        self.cache = CacheManager(
            num_blocks=runner.kv.num_blocks, block_size=runner.kv.block_size, prefix_caching=prefix_caching
        )
        self._states: dict[str, DraftState] = {}

    def propose(self, views: Sequence[RequestView], budgets: Sequence[int]) -> list[Draft | None]:
        jobs = [self._begin(view, budget) for view, budget in zip(views, budgets, strict=True)]
        begun = [job for job in jobs if job is not None]
        while parts := next_parts(begun, self._max_num_batched_tokens):
            self._run(parts)
        if self._width > 1:
            trees = {job.view.request_id: self._plant(job) for job in begun if job.candidates}
            while grown := next_trees(list(trees.values()), self._max_num_batched_tokens):
                self._grow(grown)
            return [None if job is None else self._finish_tree(job, trees.get(job.view.request_id)) for job in jobs]
        return [self._finish(job) if job is not None else None for job in jobs]

    def release(self, request_id: str) -> None:
        self._vocabulary.release(request_id)
        self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        self.cache.free(request_id)
        self._states.pop(request_id, None)

    def _begin(self, view: RequestView, budget: int) -> DraftJob | None:
        """Rolls back to what is still right and reserves blocks; None where the text cannot be read or has no room."""
        known, request_id = self._vocabulary.read(view), view.request_id
        if known is None:
            return None
        if request_id not in self._states:
            self._states[request_id] = self._new_state(view, known)
        state = self._states[request_id]
        start = min(len(state.computed), len(known) - 1)  # one token at least is computed anew, for its row
        wrong = np.flatnonzero(state.computed[:start] != known[:start])
        start = int(wrong[0]) if len(wrong) else start
        room = min(self.cache.num_allocatable(request_id, num_computed=start) + start, self._runner.max_model_len)
        num_draft = min(budget, room - len(known) + 1)  # the last drafted token is not computed
        if num_draft < 1:
            self._drop(request_id)
            return None
        copies = self.cache.allocate(request_id, num_computed=start, num_new=len(known) + num_draft - 1 - start)
        if copies:  # a block of guesses that another request also made, and found here
            self._runner.move(*self.cache.copy_slots(copies))
        state.computed = state.computed[:start]  # all that holds if a pass is interrupted
        state.sampling.follow(view.token_ids)
        tokens = np.empty(len(known) + (num_draft if self._width == 1 else 1), dtype=np.int32)
        tokens[: len(known)] = known
        return DraftJob(view, state, tokens, start, len(known), num_draft)

    def _new_state(self, view: RequestView, known: np.ndarray) -> DraftState:
        sampling = SamplingState(view, eos_ids=self._eos_ids, vocab_size=self._vocabulary.size)
        num_cached = self.cache.match_prefix(view.request_id, known)
        return DraftState(known[:num_cached].copy(), sampling)

    def _run(self, parts: list[Part]) -> None:
        """One pass; samples the next token of every job whose pending tokens are all in it."""
        sampled = [job for job, count in parts if count == job.pending]
        sampling = self._sample([job.next_row for job in sampled]) if sampled else None
        output = self._runner.forward(pack(parts, self.cache), sampling)
        for job, count in parts:
            job.num_computed += count
        for row, job in enumerate(sampled):
            assert output.token_ids is not None
            token_id = int(output.token_ids[row])
            if token_id < 0:  # all that the request allows here are tokens that the model does not have
                job.end()
                continue
            chance = 1.0
            if self._rule_needs_law:  # may not stop for what it drew
                assert output.laws is not None
                job.laws.append(output.laws[row])
            else:
                job.candidates = Candidates.of(output, row)
                chance = float(job.candidates.chances[0])
                if job.reach * chance < self._least_reach:
                    job.end()
                    continue
            job.tokens[job.length] = self._vocabulary.own_id(token_id)
            job.length += 1
            drafted = [*job.drafted, token_id]
            job.draft(drafted if self._rule_needs_law else self._vocabulary.respell(job.view, drafted), chance)

    def _sample(self, rows: list[NextRow]) -> RowSampling:
        return sample_next(
            rows,
            rule_needs_law=self._rule_needs_law,
            token_map=self._vocabulary.token_map,
            num_candidates=0 if self._rule_needs_law else NUM_CANDIDATES,
        )

    def _finish(self, job: DraftJob) -> Draft | None:
        self.cache.commit(job.view.request_id, job.tokens, job.num_computed)
        job.state.computed = job.tokens[: job.num_computed]
        if not job.drafted:
            return None
        draft = Draft.chain(job.drafted, source=self.name)
        if not self._rule_needs_law:
            return replace(draft, confidence=np.array(job.chances))
        probs = np.stack(job.laws)
        return replace(draft, law=DraftLaw(probs), confidence=probs[np.arange(len(draft)), draft.token_ids])

    def _plant(self, job: DraftJob) -> DraftTree:
        budget = min(job.num_draft, self._max_num_batched_tokens)
        return DraftTree(job, width=self._width, budget=budget, least_reach=self._least_reach)

    def _grow(self, trees: list[DraftTree]) -> None:
        """One pass over the next level of each tree."""
        parts = [tree.part() for tree in trees]
        own_ids = [np.array([self._vocabulary.own_id(t) for t in p.token_ids.tolist()], np.int32) for p in parts]
        sampling = self._sample([row for tree in trees for row in tree.next_rows()])
        output = self._runner.forward(pack_trees(trees, own_ids, self.cache), sampling)
        row = 0
        for tree in trees:
            count = len(tree.level)
            tree.grow([Candidates.of(output, row + i) for i in range(count)])
            row += count

    def _finish_tree(self, job: DraftJob, tree: DraftTree | None) -> Draft | None:
        self.cache.commit(job.view.request_id, job.tokens, job.num_computed)
        job.state.computed = job.tokens[: job.num_computed]
        return tree.draft(self.name) if tree is not None else None
