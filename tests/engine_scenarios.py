"""Scenarios for the engine: requests that arrive, are cancelled and meet drafts of every kind, on tiny K/V budgets.

`play` runs one and checks what must hold of each: integrity after every step, no request lost, whole streams, all
blocks free at the end and, where asked for, the outputs of a plain engine that has each request to itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from paceline import verify
from paceline.config import CacheConfig, SchedulerConfig
from paceline.control.cost import PassCosts
from paceline.control.policy import CostPolicy
from paceline.draft.draft_model import DraftModelDrafter
from paceline.draft.hybrid import HybridDrafter
from paceline.draft.layer_skip import LayerSkipDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.prediction import PredictionDrafter
from paceline.draft.recycle import RecycleDrafter
from paceline.draft.suffix import SuffixDrafter
from paceline.engine.engine import Engine
from paceline.interfaces import Drafter, Runner
from paceline.params import RequestSpeculation, SamplingParams
from paceline.testing import ScriptedDrafter, ToyModel
from paceline.types import Delta, Draft, Load, Observation, RequestOutput, RequestView
from toy_engine import TOKENIZER

V = TOKENIZER.vocab_size
CONTEXT = 40  # tokens a sequence may hold
WIDE_CONTEXT = 110  # room for trees of 64 nodes
MAX_STEPS = 4000  # far beyond what any scenario needs: a request that is still there was lost
STEM = [0, 5, 2, 7, 7, 3, 5, 2, 7, 9, 4, 4, 8, 3, 5, 2]  # prompts begin with a part of it, so prefixes are shared


@dataclass(frozen=True)
class Arrival:
    prompt: tuple[int, ...]
    params: SamplingParams
    at_step: int
    cancel_after: int | None  # steps; None = runs to its end
    stream: bool
    priority: int = 0
    overdue_after: int | None = None  # steps; None = has no deadline
    predicted: int | None = None  # seed of what it predicts of its output, which is partly right; None = nothing


@dataclass(frozen=True)
class Setting:
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    num_draft_tokens: int
    drafter: str
    draft_blocks: int
    seed: int  # of the scripted drafters
    row_price: float | None = None  # of a node, in passes over one row: CostPolicy selects; None = FixedLength


prompts = st.builds(
    lambda stem, tail: tuple(STEM[:stem] + tail),
    st.integers(0, len(STEM)),
    st.lists(st.integers(0, V - 1), min_size=1, max_size=6),
)
greedy_params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 20),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 1, 2, 4]),
    ignore_eos=st.booleans(),
    stop=st.sampled_from([(), (), ("a",), ("bc", "ha")]),
    logprobs=st.sampled_from([None, None, 0, 2]),
    speculation=st.sampled_from([True, True, True, False, RequestSpeculation(1), RequestSpeculation(method="none")]),
)


@st.composite
def any_params(draw: st.DrawFn) -> SamplingParams:
    params = draw(greedy_params)
    return replace(
        params,
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0])),
        top_k=draw(st.sampled_from([0, 0, 3])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.8])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -0.5])),
        logit_bias=draw(st.sampled_from([{}, {}, {1: -5.0, 3: 2.0}])),
        banned_token_ids=draw(st.sampled_from([(), (), (7,)])),
        allowed_token_ids=draw(st.sampled_from([None, None, tuple(range(8))])),
        min_tokens=draw(st.integers(0, params.max_tokens)),
        stop_token_ids=draw(st.sampled_from([(), (), (4,)])),
        prompt_logprobs=draw(st.sampled_from([None, None, 1])),
    )


def arrivals(params: st.SearchStrategy[SamplingParams]) -> st.SearchStrategy[list[Arrival]]:
    one = st.builds(
        Arrival,
        prompt=prompts,
        params=params,
        at_step=st.integers(0, 10),
        cancel_after=st.sampled_from([None, None, None, None, None, None, 0, 1, 4, 12]),
        stream=st.booleans(),
        priority=st.sampled_from([0, 0, 0, -1, 2]),
        overdue_after=st.sampled_from([None, None, None, None, None, 0, 3, 9]),
        predicted=st.sampled_from([None, None, 0, 1, 2]),
    )
    return st.lists(one, min_size=1, max_size=5)


@st.composite
def any_setting(
    draw: st.DrawFn,
    drafters: tuple[str, ...],
    *,
    context: int = CONTEXT,
    max_draft_tokens: int = 6,
    block_sizes: tuple[int, ...] = (1, 2, 4, 8),
) -> Setting:
    block_size = draw(st.sampled_from(block_sizes))
    least = -(-context // block_size)
    return Setting(
        block_size=block_size,
        num_blocks=least + draw(st.sampled_from([0, 1, 3, 4 * least])),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.sampled_from([1, 2, 5, 16, 64])),
        prefix_caching=draw(st.booleans()),
        num_draft_tokens=draw(st.integers(1, max_draft_tokens)),
        drafter=draw(st.sampled_from(drafters)),
        draft_blocks=draw(st.sampled_from([2, least // 2 + 1, least, 5 * least])),
        seed=draw(st.integers(0, 1000)),
        row_price=draw(st.sampled_from([None, None, 0.0, 0.2, 0.7])),
    )


def wide_setting() -> st.SearchStrategy[Setting]:
    """Trees of 1 to 64 nodes on blocks of 1 to 64 tokens; the runner holds sequences of WIDE_CONTEXT."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    return any_setting(("tree",), context=WIDE_CONTEXT, max_draft_tokens=64, block_sizes=sizes)


def long_params(params: st.SearchStrategy[SamplingParams]) -> st.SearchStrategy[SamplingParams]:
    """The same, with outputs long enough for wide trees; some reach the end of the context."""
    return st.builds(
        lambda own, length: replace(own, max_tokens=length), params, st.sampled_from([30, 70, WIDE_CONTEXT])
    )


def toy(**options: Any) -> ToyModel:
    return ToyModel(**{"vocab_size": V, "seed": 3, "order": 3, "max_model_len": CONTEXT, "skip_drift": 0.7, **options})


class TimelessPolicy(CostPolicy):
    """CostPolicy in a world where each node costs what the setting says, whatever the clock shows."""

    def __init__(self, row_price: float) -> None:
        super().__init__(PassCosts({1: 1.0, 101: 1.0 + 100 * row_price}))

    def drafted(
        self, drafter: Drafter, views: Sequence[RequestView], drafts: Sequence[Draft | None], *, seconds: float
    ) -> None:
        super().drafted(drafter, views, drafts, seconds=0.1)

    def select(
        self, views: Sequence[RequestView], drafts: Sequence[Draft | None], load: Load, *, seconds: float
    ) -> list[Draft | None]:
        return super().select(views, drafts, load, seconds=0.01)

    def observe(self, step: Observation) -> None:
        drafted = sum(len(draft) for draft in step.drafts if draft is not None)
        super().observe(replace(step, seconds=self.costs.seconds(max(1, self._step.load.rows + drafted))))

    def passed(self, load: Load, seconds: float) -> None:
        super().passed(load, self.costs.seconds(max(1, load.rows)))


def engine_of(runner: Runner, *, rule: str = "coupled", drafter: Any = None, setting: Setting) -> Engine:
    return Engine(
        runner,
        tokenizer=TOKENIZER,
        verifier=verify.create(rule, epsilon=0.3, alpha=0.09),
        drafter=drafter,
        controller=None if setting.row_price is None else TimelessPolicy(setting.row_price),
        max_draft_tokens=setting.num_draft_tokens,
        max_predicted_tokens=3 * setting.num_draft_tokens,
        scheduler=SchedulerConfig(
            max_num_seqs=setting.max_num_seqs, max_num_batched_tokens=setting.max_num_batched_tokens
        ),
        cache=CacheConfig(block_size=setting.block_size, prefix_caching=setting.prefix_caching),
    )


ALONE = Setting(4, 100, 8, 64, False, 1, "none", 0, 0)
MakeRunner = Callable[..., Runner]  # takes num_blocks, block_size, and for a draft model drift and max_model_len
_plain_outputs: dict[tuple[MakeRunner, str], RequestOutput] = {}  # the reference is a pure function: computed once


def plain_alone(arrival: Arrival, make_runner: MakeRunner = toy) -> RequestOutput:
    key = make_runner, repr((arrival.prompt, arrival.params))
    if key not in _plain_outputs:
        engine = engine_of(make_runner(num_blocks=ALONE.num_blocks, block_size=ALONE.block_size), setting=ALONE)
        engine.add_request(list(arrival.prompt), arrival.params)
        while engine.has_unfinished:
            for delta in engine.step():
                if delta.output is not None:
                    _plain_outputs[key] = delta.output
    return _plain_outputs[key]


def script(
    kind: str, answers: dict[str, list[int]], setting: Setting
) -> Callable[[RequestView], Draft | list[int] | None]:
    """Proposals that are right, wrong, trees, or a mixture, the same for the same request at the same length."""

    def propose(view: RequestView) -> Draft | list[int] | None:
        rng = random.Random(f"{setting.seed} {view.request_id} {len(view.token_ids)}")
        coming = answers[view.request_id][len(view.token_ids) :] + rng.choices(range(V), k=setting.num_draft_tokens)
        chosen = rng.choice(["right", "wrong", "tree", "none"]) if kind == "mixed" else kind
        if chosen == "none":
            return None
        if chosen == "right":
            return coming
        if chosen == "wrong":
            return [t if rng.random() < 0.7 else rng.randrange(V) for t in coming]
        reach = rng.choice([1, 2, 4, setting.num_draft_tokens])  # parents are this near: from chains to bushes
        depths, parents, tokens = [], [], []
        for node in range(setting.num_draft_tokens):
            parent = rng.randrange(max(-1, node - reach), node)
            depths.append(0 if parent < 0 else depths[parent] + 1)
            parents.append(parent)
            tokens.append(coming[depths[-1]] if rng.random() < 0.8 else rng.randrange(V))
        return Draft(np.array(tokens, dtype=np.int32), np.array(parents, dtype=np.int32), source="tree")

    return propose


def drafter_of(
    setting: Setting, answers: dict[str, list[int]], *, needs_law: bool, make_runner: MakeRunner, runner: Runner
) -> Any:
    """runner: the target's, which some drafters share."""
    if setting.drafter == "none":
        return None
    if setting.drafter == "ngram":
        return NgramDrafter(max_ngram=3, min_ngram=1)
    if setting.drafter == "recycle":
        return RecycleDrafter(vocab_size=V, least_reach=0.0)
    if setting.drafter == "suffix":
        return SuffixDrafter(min_probability=0.05, store_tokens=40)
    if setting.drafter in ("draft_model", "draft_tree"):
        model = make_runner(drift=0.7, num_blocks=setting.draft_blocks, block_size=setting.block_size, max_model_len=30)
        return DraftModelDrafter(
            model,
            rule_needs_law=needs_law,
            width=1 if setting.drafter == "draft_model" else 3,
            least_reach=0.05,
            prefix_caching=setting.prefix_caching,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            eos_ids=TOKENIZER.eos_ids,
        )
    if setting.drafter == "layer_skip":
        return LayerSkipDrafter(runner, layers=(0,), rule_needs_law=needs_law, eos_ids=TOKENIZER.eos_ids)
    if setting.drafter == "hybrid":  # a tree in blocks that hold what one of its drafters computed for a chain
        members = [replace(setting, drafter=name) for name in ("tree", "layer_skip")]
        options = {"needs_law": False, "make_runner": make_runner, "runner": runner}
        return HybridDrafter([drafter_of(own, answers, **options) for own in members], vocab_size=V)
    return ScriptedDrafter(script(setting.drafter, answers, setting))


def predict(answer: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """An answer with some of its tokens replaced, doubled or left out."""
    rng = random.Random(seed)
    pieces = ([token] * rng.choice([0, 1, 1, 1, 1, 1, 2]) for token in answer)
    return tuple(token if rng.random() < 0.9 else rng.randrange(V) for piece in pieces for token in piece)


class Scenario:
    """Runs arrivals through one engine; `outputs` and `deltas` hold what became of each."""

    def __init__(self, setting: Setting, plan: list[Arrival], *, rule: str, make_runner: MakeRunner = toy) -> None:
        self.plan = plan
        self.make_runner = make_runner
        self.answers: dict[str, list[int]] = {}
        runner = make_runner(num_blocks=setting.num_blocks, block_size=setting.block_size)
        self.drafter = drafter_of(
            setting, self.answers, needs_law=rule in ("rejection", "block"), make_runner=make_runner, runner=runner
        )
        drafter = None
        if self.drafter is not None:
            drafter = PredictionDrafter(self.drafter, max_draft_tokens=setting.num_draft_tokens)
        self.engine = engine_of(runner, rule=rule, drafter=drafter, setting=setting)
        self.ids: dict[int, str] = {}
        self.started: dict[int, int] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.deltas: dict[str, list[Delta]] = {}

    def run(self) -> None:
        for step in range(MAX_STEPS):
            self.arrive(step)
            self.cancel(step)
            if self.engine.has_unfinished:
                self.step()
                self.check()
            elif len(self.ids) == len(self.plan):
                return
        pytest.fail(f"requests were lost: {sorted(set(self.ids.values()) - set(self.outputs))}")

    def step(self) -> None:
        for delta in self.engine.step():
            self.take(delta)

    def arrive(self, step: int) -> None:
        for index, arrival in enumerate(self.plan):
            if index not in self.ids and arrival.at_step <= step:
                answers, params = plain_alone(arrival, self.make_runner).outputs, arrival.params
                if arrival.predicted is not None:
                    params = replace(params, prediction=predict(answers[0].token_ids, arrival.predicted))
                request_id = self.engine.add_request(
                    list(arrival.prompt),
                    params,
                    stream=arrival.stream,
                    priority=arrival.priority,
                    deadline=None if arrival.overdue_after is None else math.inf,
                )
                self.ids[index], self.started[index] = request_id, step
                for choice in answers:
                    self.answers[f"{request_id}/{choice.index}"] = [*arrival.prompt, *choice.token_ids]

    def cancel(self, step: int) -> None:
        for index, request_id in self.ids.items():
            if request_id not in self.engine.requests:
                continue
            if self.plan[index].cancel_after == step - self.started[index]:
                self.end_early(self.engine.abort(request_id))
            elif self.plan[index].overdue_after == step - self.started[index]:
                self.engine.requests[request_id].deadline = 0.0
                self.end_early(self.engine.abort_overdue())

    def end_early(self, deltas: list[Delta]) -> None:
        assert deltas[-1].output is not None
        for delta in deltas:
            self.take(delta)
        self.check()

    def take(self, delta: Delta) -> None:
        assert delta.request_id not in self.outputs, "a delta after the last one"
        self.deltas.setdefault(delta.request_id, []).append(delta)
        if delta.output is not None:
            self.outputs[delta.request_id] = delta.output

    def check(self) -> None:
        self.engine.check_integrity()
        if isinstance(self.drafter, DraftModelDrafter):
            self.drafter.cache.check_integrity()
        if isinstance(self.drafter, SuffixDrafter) and self.drafter.store is not None:
            self.drafter.store.check_integrity()

    def check_end(self) -> None:
        engine = self.engine
        assert not engine.scheduler.running
        assert not engine.scheduler.waiting
        assert engine.cache.num_free_blocks == engine.cache.num_blocks
        if isinstance(self.drafter, DraftModelDrafter):
            assert self.drafter.cache.num_free_blocks == self.drafter.cache.num_blocks
        for index, arrival in enumerate(self.plan):
            output = self.outputs[self.ids[index]]
            assert [choice.index for choice in output.outputs] == list(range(arrival.params.n))
            assert all(choice.finish_reason is not None for choice in output.outputs)
            assert all(len(choice.origins) == len(choice.token_ids) for choice in output.outputs)
            if arrival.stream:
                self.check_stream(output)

    def check_stream(self, output: RequestOutput) -> None:
        deltas = self.deltas[output.request_id]
        for choice in output.outputs:
            own = [delta for delta in deltas if delta.index == choice.index]
            assert tuple(t for delta in own for t in delta.token_ids) == choice.token_ids
            shown = "".join(delta.text for delta in own)
            assert shown == choice.text

    def check_equal_to_plain(self) -> None:
        for index, arrival in enumerate(self.plan):
            output, plain = self.outputs[self.ids[index]], plain_alone(arrival, self.make_runner)
            assert output.prompt_token_ids == arrival.prompt
            for choice, alone in zip(output.outputs, plain.outputs, strict=True):
                if choice.finish_reason == "abort" and choice.stop_reason in (None, "deadline"):
                    assert arrival.cancel_after is not None or choice.stop_reason == "deadline"
                    assert choice.token_ids == alone.token_ids[: len(choice.token_ids)]
                else:
                    assert replace(choice, origins=()) == replace(alone, origins=())
            if output.outputs[0].finish_reason != "abort":
                assert output.prompt_logprobs == plain.prompt_logprobs


def play(
    setting: Setting,
    plan: list[Arrival],
    *,
    rule: str = "coupled",
    equal: bool = True,
    make_runner: MakeRunner = toy,
) -> None:
    scenario = Scenario(setting, plan, rule=rule, make_runner=make_runner)
    scenario.run()
    scenario.check_end()
    if equal:
        scenario.check_equal_to_plain()
