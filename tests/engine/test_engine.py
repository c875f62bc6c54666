"""Engine: what it refuses, what it counts, what it tells drafters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.control.policy import FixedLength
from paceline.engine.counters import counters
from paceline.engine.probe import last_row
from paceline.errors import ConfigError, DraftMismatchError, PromptError
from paceline.interfaces import Drafter
from paceline.params import SamplingParams
from paceline.testing import ScriptedDrafter
from paceline.types import Draft, DraftLaw, Load, Observation
from toy_engine import PROMPT, TOKENIZER, make_engine, oracle, run

V = TOKENIZER.vocab_size


def test_an_idle_engine_steps_to_nothing() -> None:
    assert make_engine().step() == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "is empty"), ([1] * 128, "may hold 128"), ([1, V], "outside the vocabulary"), ([-1], "outside")],
)
def test_prompts_that_cannot_run(prompt: list[int], message: str) -> None:
    engine = make_engine()
    with pytest.raises(PromptError, match=message):
        engine.add_request(prompt, SamplingParams())
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(allowed_token_ids=(1,), min_tokens=1),  # only the end-of-text token, and not before one token
        SamplingParams(allowed_token_ids=(3, 4), banned_token_ids=(3, 4, 5)),
        SamplingParams(banned_token_ids=tuple(range(V))),
        SamplingParams(banned_token_ids=(V,)),
        SamplingParams(logit_bias={V + 3: 1.0}),
    ],
    ids=str,
)
def test_params_that_leave_nothing_or_name_unknown_tokens_are_refused_at_once(params: SamplingParams) -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match=r"leave no token|outside the vocabulary"):
        engine.add_request(PROMPT, params)
    assert not engine.has_unfinished


def test_a_drafter_needs_a_length() -> None:
    with pytest.raises(ConfigError, match="max_draft_tokens"):
        make_engine(lambda view: [1], num_draft_tokens=0)


def draft(token_ids, parents, law=None) -> Draft:
    return Draft(np.asarray(token_ids), np.asarray(parents), law=law)


def law(*rows) -> DraftLaw:
    return DraftLaw(np.array([np.eye(V)[token] for token in rows]))


@pytest.mark.parametrize(
    ("draft", "rule", "message"),
    [
        (Draft.chain([V], source="bad"), "coupled", "outside the target's"),
        (draft([2, 3], [-1, -1]), "rejection", "takes chains"),
        (draft([2.0, 3.0], [-1, 0]), "coupled", "integer array"),
        (draft([[2, 3]], [[-1, 0]]), "coupled", "integer array"),
        (Draft([2, 3], [-1, 0]), "coupled", "integer array"),  # type: ignore[arg-type]
        (draft([2, 3], [-1]), "coupled", "2 nodes with 1 parents"),
        (draft([2, 3], [1, -1]), "coupled", "before its parent"),
        (draft([2, 3], [-1, -2]), "coupled", "before its parent"),
        (draft([2, 3, 4, 5, 6, 7], [-1, 0, 1, 2, 3, 4]), "coupled", "where 4 were allowed"),
        (replace(Draft.chain([2, 3], source="x"), confidence=np.array([0.5])), "coupled", "array of 2 probabilities"),
        (replace(Draft.chain([2], source="x"), confidence=np.array([1.5])), "coupled", "array of 1 probabilities"),
        (replace(Draft.chain([2], source="x"), confidence=np.array([np.nan])), "coupled", "array of 1 probabilities"),
        (replace(Draft.chain([2], source="x"), confidence=[0.5]), "coupled", "array of 1 probabilities"),
        (replace(Draft.chain([2, 3], source="x"), proposers=(("a",),)), "coupled", "2 tuples of names"),
        (replace(Draft.chain([2], source="x"), proposers=(3,)), "coupled", "1 tuples of names"),  # type: ignore[arg-type]
        (replace(Draft.chain([2], source="x"), proposers=7), "coupled", "1 tuples of names"),  # type: ignore[arg-type]
        (draft([2, 3], [-1, 0], law(2)), "block", r"must be \[nodes"),
        (draft([2, 3], [-1, 0], law(2, 4)), "block", "its own law excludes"),
        (draft([2, 3], [-1, 0], np.eye(V)[[2, 3]]), "block", "no DraftLaw of arrays"),
        (draft([2], [-1], DraftLaw([[1.0]], np.array([2]))), "block", "no DraftLaw of arrays"),  # type: ignore[arg-type]
        (draft([2], [-1], DraftLaw(np.array([[1.0]]), [2])), "block", "no DraftLaw of arrays"),  # type: ignore[arg-type]
        (draft([2], [-1], DraftLaw(np.array([["1"]]), np.array([2]))), "block", "no DraftLaw of arrays"),
        (replace(Draft.chain([2], source="x"), source=None), "coupled", "must be the drafter's name"),  # type: ignore[arg-type]
        ([2, 3], "coupled", "must be a Draft"),
    ],
    ids=str,
)
def test_drafts_that_do_not_fit_are_an_error_and_nothing_leaks(draft: Draft, rule: str, message: str) -> None:
    class Drafting(Drafter):
        name = "plug-in"

        def propose(self, views, budgets):
            return [draft] * len(views)

    engine = make_engine(drafter=Drafting(), rule=rule)
    request_id = engine.add_request(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    with pytest.raises(DraftMismatchError, match=message):
        engine.step()
    engine.check_integrity()
    engine.abort(request_id)
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def test_a_request_whose_drafter_failed_at_its_end_can_be_aborted() -> None:
    class Failing(Drafter):
        name = "failing"

        def propose(self, views, budgets):
            return [None] * len(views)

        def release(self, request_id):
            raise RuntimeError("release")

    engine = make_engine(drafter=Failing())
    request_id = engine.add_request(PROMPT, SamplingParams(max_tokens=1))
    with pytest.raises(RuntimeError, match="release"):
        engine.step()
    assert engine.abort(request_id) == []
    assert not engine.has_unfinished
    engine.check_integrity()
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def test_a_drafter_that_fails_leaves_the_shared_blocks_whole() -> None:
    """The second choice gets its own copy of the prompt's last block in a step whose drafter fails for the first."""

    class Failing(Drafter):
        name = "failing"
        failures = 0

        def propose(self, views, budgets):
            self.failures += 1
            raise RuntimeError("no draft today")

    params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.8, seed=4, n=2)
    plain = run(make_engine(), [PROMPT[:10]], params)[0]
    drafter = Failing()
    engine = make_engine(drafter=drafter)
    engine.add_request(PROMPT[:10], params)
    outputs = []
    while engine.has_unfinished:
        try:
            outputs += [delta.output for delta in engine.step() if delta.output is not None]
        except RuntimeError:
            if drafter.failures == 3:
                engine.drafting = None
        engine.check_integrity()
    assert [choice.token_ids for choice in outputs[0].outputs] == [choice.token_ids for choice in plain.outputs]


def test_drafters_see_the_cache_as_the_target_left_it() -> None:
    """The table leads to every computed key, and on to as many as there is room to draft."""
    seen = []

    def script(view):
        assert view.block_table is not None
        seen.append((len(view.token_ids), view.num_computed, 4 * len(view.block_table)))

    run(make_engine(script, num_draft_tokens=4), [PROMPT], SamplingParams(max_tokens=12, ignore_eos=True))
    assert len(seen) == 10
    for known, computed, room in seen:
        assert computed == known - 1
        assert room >= known + min(4, len(PROMPT) + 12 - known - 1)


def test_counters_sum_over_requests_finished_running_and_cancelled() -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    answer = [*PROMPT, *run(make_engine(), [PROMPT], params)[0].token_ids]
    engine = make_engine(oracle(answer))
    finished = run(engine, [PROMPT], params)[0].metrics
    assert engine.metrics == finished
    request_id = engine.add_request(PROMPT, params)
    for _ in range(2):
        engine.step()
    running = engine.metrics
    assert running.num_draft_tokens == finished.num_draft_tokens + 4
    engine.abort(request_id)
    assert engine.metrics == running
    assert counters(running)["paceline:spec_decode_num_drafts_total"] == running.num_drafts
    assert counters(running)['paceline:spec_decode_num_draft_tokens_per_drafter_total{drafter="scripted"}'] == (
        running.num_draft_tokens
    )
    assert running.num_accepted_tokens_per_drafter == {"scripted": running.num_accepted_tokens}
    per_position = {k: v for k, v in counters(running).items() if "per_pos" in k}
    assert list(per_position.values()) == list(running.num_accepted_tokens_per_pos)
    assert next(iter(per_position)) == 'paceline:spec_decode_num_accepted_tokens_per_pos_total{position="0"}'


def test_drafters_are_told_what_became_of_their_drafts() -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    answer = [*PROMPT, *run(make_engine(), [PROMPT], params)[0].token_ids]
    engine = make_engine(oracle(answer))
    seen = []
    assert engine.drafter is not None
    engine.drafter.observe = lambda step: seen.append(  # type: ignore[method-assign]
        (
            len(step.views[0].token_ids),
            None if step.drafts[0] is None else len(step.drafts[0]),
            step.verdicts[0],
            step.starts.tolist(),
        )
    )
    run(engine, [PROMPT], params)
    assert [(known, nodes, starts) for known, nodes, _, starts in seen] == [
        (len(PROMPT), None, [0, len(PROMPT)]),
        (len(PROMPT) + 1, 4, [0, 5]),
    ]
    assert seen[1][2].path == (0, 1, 2, 3)


class Watcher(ScriptedDrafter):
    """Notes the successors that it is told of."""

    num_successors = 3

    def __init__(self, script) -> None:
        super().__init__(script)
        self.seen: list[tuple] = []  # (known tokens, draft, successors of the view)

    def observe(self, step: Observation) -> None:
        known = [view.token_ids.tolist() for view in step.views]
        self.seen += zip(known, step.drafts, step.successors, strict=True)


def best_next(token_ids: list[int]) -> list[int]:
    """The three largest raw logits after a text, computed on their own."""
    logits, _ = last_row(
        make_engine(), np.array(token_ids, np.int32), SamplingParams(), prompt_length=len(token_ids), seed=0
    )
    return np.argsort(-logits, kind="stable")[:3].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafters_are_told_the_best_successors_of_root_and_nodes(temperature: float) -> None:
    """Nodes of a wrong branch included; requests that share the pass, and prompt rows, shift nothing."""
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=10, ignore_eos=True, prompt_logprobs=1, repetition_penalty=1.5
    )
    answer = [*PROMPT, *run(make_engine(), [PROMPT], params)[0].token_ids]
    drafter = Watcher(oracle(answer, tree=True))
    run(make_engine(drafter=drafter, max_num_batched_tokens=8), [PROMPT, PROMPT[:5]], params)
    assert any(draft is not None and not draft.is_chain for _, draft, _ in drafter.seen)
    assert any(successors is None for _, _, successors in drafter.seen), "no chunk of a prompt without a sampled row"
    for known, draft, successors in drafter.seen:
        if successors is None:
            assert draft is None
            continue
        texts = [known]
        for token, parent in [] if draft is None else zip(draft.token_ids.tolist(), draft.parents, strict=True):
            texts.append([*texts[parent + 1], token])
        assert successors.dtype == np.int32
        assert successors.tolist() == [best_next(text) for text in texts]


def test_controllers_are_told_what_a_pass_holds_before_anybody_drafts() -> None:
    loads: list[Load] = []

    class Noting(FixedLength):
        def plan(self, views, limits, load):
            loads.append(load)
            return super().plan(views, limits, load)

    engine = make_engine(lambda view: [1, 2], max_num_batched_tokens=32, prefix_caching=False)
    assert engine.drafting is not None
    engine.drafting.control(Noting(2))
    run(engine, [PROMPT, PROMPT[:5]], SamplingParams(max_tokens=3, ignore_eos=True, min_tokens=3))
    lengths = len(PROMPT), 5
    assert loads[0] == Load(num_sequences=2, rows=sum(lengths), keys=0)
    assert loads[1] == Load(num_sequences=2, rows=2, keys=sum(lengths))


def test_successors_that_nobody_wants_are_not_computed() -> None:
    drafter = Watcher(lambda view: [1, 2])
    drafter.num_successors = 0
    run(make_engine(drafter=drafter), [PROMPT], SamplingParams(max_tokens=4))
    assert {successors for _, _, successors in drafter.seen} == {None}


def test_the_first_token_is_never_drafted() -> None:
    """A cached prompt leaves one token pending, as decoding does; it is prefill all the same."""
    engine = make_engine(lambda view: [2, 2], prefix_caching=True)
    for _ in range(2):
        output = run(engine, [[*PROMPT[:8], 3]], SamplingParams(max_tokens=1))[0]
        assert output.metrics.num_drafts == 0
    assert output.num_cached_tokens == 8
