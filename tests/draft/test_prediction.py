"""Predicted outputs through the engine: they cannot alter the text, and are drafted from as far as they are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline import LLM, CacheConfig, EngineConfig, RequestSpeculation, SamplingParams
from paceline.draft.hybrid import HybridDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.prediction import PredictionDrafter
from paceline.engine.engine import Engine
from paceline.engine.trace import read_trace
from paceline.errors import ConfigError, DraftMismatchError
from paceline.testing import ScriptedDrafter
from paceline.types import RequestView
from toy_engine import PROMPT, TOKENIZER, make_engine, oracle, run

V = TOKENIZER.vocab_size
NODES, PREDICTED = 3, 12
LONG = 40


class Asked(ScriptedDrafter):
    """Proposes nothing, or what a script says, and notes what it was asked for."""

    def __init__(self, script: Any = lambda view: None) -> None:
        super().__init__(script)
        self.asked: list[tuple[str, int, int]] = []  # request, known tokens, budget
        self.released: list[str] = []
        self.num_closed = 0

    def propose(self, views, budgets):
        self.asked += [(v.request_id, len(v.token_ids), b) for v, b in zip(views, budgets, strict=True)]
        return super().propose(views, budgets)

    def release(self, request_id: str) -> None:
        self.released.append(request_id)

    def close(self) -> None:
        self.num_closed += 1


def engine(other: Any = None, **options: Any) -> Engine:
    drafter = PredictionDrafter(other or Asked(), max_draft_tokens=NODES)
    return make_engine(drafter=drafter, num_draft_tokens=NODES, max_predicted_tokens=PREDICTED, **options)


def params_of(temperature: float = 0.0, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=4, max_tokens=LONG, ignore_eos=True, **options)


def predicting(prediction: Any, temperature: float = 0.0, **options: Any) -> SamplingParams:
    return params_of(temperature, prediction=prediction, **options)


def edited(answer: tuple[int, ...]) -> tuple[int, ...]:
    """With a token replaced, two inserted and three left out."""
    other = (answer[8] + 1) % V
    return (*answer[:8], other, *answer[9:16], 2, 3, *answer[16:24], *answer[27:])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_text_is_that_of_plain_decoding(temperature: float, rule: str) -> None:
    plain = run(make_engine(), [PROMPT], params_of(temperature))[0]
    answer = plain.token_ids
    predictions = [answer, edited(answer), answer[::-1], (5,) * 9, (), (*answer, *range(V)) * 40, range(2, V)]
    for others in ({}, {"other": NgramDrafter(min_ngram=1)}, {"other": Asked(oracle([*PROMPT, *answer], tree=True))}):
        if rule == "rejection" and others:
            continue
        outputs = run(engine(**others, rule=rule), [PROMPT] * 7, [predicting(p, temperature) for p in predictions])
        if rule == "coupled" or temperature == 0:
            assert {output.token_ids for output in outputs} == {answer}
        assert outputs[0].lossless
        assert outputs[4].metrics.accepted_prediction_tokens == 0


def test_a_right_prediction_takes_few_steps_and_is_counted() -> None:
    plain = run(make_engine(), [PROMPT], params_of())[0]
    [output] = run(engine(), [PROMPT], predicting(plain.token_ids))
    metrics = output.metrics
    assert output.token_ids == plain.token_ids
    assert metrics.num_steps <= 6  # drafts of 2, 5, 12, 12 tokens
    assert metrics.accepted_prediction_tokens == metrics.num_accepted_tokens == LONG - metrics.num_steps
    assert metrics.rejected_prediction_tokens == 0
    assert metrics.num_draft_tokens_per_drafter == {"prediction": metrics.num_draft_tokens}


def test_edits_are_counted_as_rejected() -> None:
    plain = run(make_engine(), [PROMPT], params_of())[0]
    [output] = run(engine(), [PROMPT], predicting(edited(plain.token_ids)))
    metrics = output.metrics
    assert metrics.rejected_prediction_tokens == metrics.num_draft_tokens - metrics.num_accepted_tokens > 0
    assert metrics.accepted_prediction_tokens > LONG / 2


def test_a_prediction_that_keeps_failing_is_hardly_drafted_from() -> None:
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=100, ignore_eos=True, prediction=rng.integers(0, V, 60))
    [output] = run(engine(), [PROMPT], params)
    assert output.metrics.num_draft_tokens_per_drafter["prediction"] < 40


def test_others_are_asked_as_if_there_were_no_predictions() -> None:
    """For requests without one with the usual budget; for the others where the prediction has nothing to say."""
    plain = run(make_engine(), [PROMPT], params_of())[0]
    for batch in ([()], [(), ()], [(), plain.token_ids, ()]):
        other = Asked()
        run(engine(other), [PROMPT] * len(batch), [predicting(p) for p in batch])
        alone = Asked()
        run(make_engine(drafter=alone, num_draft_tokens=NODES), [PROMPT], params_of())
        for index, prediction in enumerate(batch):
            request_id = f"{index + 1}/0"
            asked = [(length, budget) for name, length, budget in other.asked if name == request_id]
            usual = [(length, budget) for _, length, budget in alone.asked]
            assert asked == ([] if prediction else usual)
            assert request_id in other.released


def test_where_the_prediction_says_nothing_the_other_drafter_gets_its_own_budget() -> None:
    plain = run(make_engine(), [PROMPT], params_of())[0]
    other = Asked(oracle([*PROMPT, *plain.token_ids]))
    [output] = run(engine(other), [PROMPT], predicting([0] * 5))
    assert output.token_ids == plain.token_ids
    assert max(budget for *_, budget in other.asked) == NODES
    assert output.metrics.num_accepted_tokens_per_drafter["scripted"] > LONG / 2


def test_names_layers_and_closing_are_those_of_the_other_drafter() -> None:
    other = Asked()
    other.note, other.hidden_layers, other.num_successors = "good on Sundays", (1, "final"), 3
    drafter = PredictionDrafter(other, max_draft_tokens=NODES)
    assert (drafter.name, drafter.note) == ("scripted", "good on Sundays")
    assert (drafter.hidden_layers, drafter.num_successors) == ((1, "final"), 3)
    assert drafter.members == ("scripted", "prediction")
    drafter.close()
    assert other.num_closed == 1
    hybrid = HybridDrafter([NgramDrafter(), other], vocab_size=V)
    assert PredictionDrafter(hybrid, max_draft_tokens=NODES).members == ("ngram", "scripted", "prediction")


def test_a_preempted_request_finds_its_place_again() -> None:
    plain = run(make_engine(), [PROMPT], params_of())[0]
    drafter = PredictionDrafter(Asked(), max_draft_tokens=NODES)
    known = np.array([*PROMPT, *plain.token_ids[:12]], dtype=np.int32)
    view = RequestView("r", known, len(PROMPT), predicting(edited(plain.token_ids)), seed=0, stream=0, attempt=0)
    [before] = drafter.propose([view], [PREDICTED])
    drafter.release("r")
    [after] = drafter.propose([view], [PREDICTED])
    assert before is not None
    assert after is not None
    assert before.token_ids.tolist() == after.token_ids.tolist()


def test_confidence_and_length_grow_with_what_was_right() -> None:
    drafter = PredictionDrafter(Asked(), max_draft_tokens=NODES)
    lengths, chances = [], []
    for known in (1, 2, 5, 30):
        tokens = np.arange(known + 1, dtype=np.int32)
        params = predicting(range(1, 90))
        [draft] = drafter.propose([RequestView("r", tokens, 1, params, seed=0, stream=0, attempt=0)], [64])
        assert draft is not None
        assert draft.confidence is not None
        assert draft.token_ids.tolist() == list(range(known + 1, known + 1 + len(draft)))
        assert draft.confidence[0] ** (len(draft) + 1) < 0.25 <= draft.confidence[0] ** len(draft) + 1e-12
        lengths.append(len(draft))
        chances.append(draft.confidence[0])
    assert lengths == sorted(set(lengths))
    assert chances == sorted(set(chances))


@pytest.mark.parametrize("token_id", [V, 10**12])
def test_tokens_outside_the_vocabulary_are_refused(token_id: int) -> None:
    with pytest.raises(ConfigError, match=f"prediction: token id {token_id} is outside the vocabulary of {V}"):
        engine().add_request(PROMPT, predicting([5, token_id]))


def test_a_request_without_speculation_is_plain_whatever_it_predicts() -> None:
    plain = run(make_engine(), [PROMPT], params_of())[0]
    for own in (False, RequestSpeculation(method="none")):
        [output] = run(engine(), [PROMPT], predicting(plain.token_ids, speculation=own))
        assert output.token_ids == plain.token_ids
        assert output.metrics.num_drafts == 0
    [output] = run(make_engine(), [PROMPT], predicting(plain.token_ids))  # no drafter at all
    assert output.metrics.num_drafts == 0


def test_a_list_of_the_wrong_length_names_the_other_drafter() -> None:
    bad = Asked()
    bad.propose = lambda views, budgets: []  # type: ignore[method-assign]
    with pytest.raises(DraftMismatchError, match="'scripted' must return a list of 1 drafts"):
        run(engine(bad), [PROMPT, PROMPT], [predicting(()), predicting(range(V))])


@pytest.mark.parametrize("method", ["ngram", "suffix+recycle"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_real_engine_gives_the_ids_of_plain_decoding(tiny_llama, temperature: float, method: str) -> None:
    config = EngineConfig(num_threads=1, cache=CacheConfig(kv_cache_memory=4 << 20))
    llm = LLM(str(tiny_llama), config=config, speculation=method)
    prompts = ["ab ab ab ab", "x y z x y"]
    plain = llm.generate(prompts, params_of(temperature, speculation=False))
    predictions = [llm.encode_prediction(output.text) for output in plain]
    for each in (predictions, predictions[::-1], [plain[0].token_ids, ()], [p * 400 for p in predictions]):
        outputs = llm.generate(prompts, [predicting(p, temperature) for p in each])
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    [copied] = llm.generate(prompts[0], predicting(plain[0].token_ids, temperature))
    assert copied.metrics.num_steps <= 6
    assert copied.metrics.accepted_prediction_tokens >= LONG - 6


def test_a_trace_tells_which_nodes_were_predicted(tiny_llama, tmp_path) -> None:
    config = EngineConfig(num_threads=1, cache=CacheConfig(kv_cache_memory=4 << 20))
    llm = LLM(str(tiny_llama), config=config, speculation="ngram", trace=tmp_path / "trace")
    [plain] = llm.generate("x y z", params_of(speculation=False))
    cap = RequestSpeculation(num_speculative_tokens=4)
    [output] = llm.generate("x y z", predicting(np.array(plain.token_ids), speculation=cap))
    trace = read_trace(str(tmp_path / "trace"))
    params = trace.requests[output.request_id].params
    assert params["prediction"] == list(plain.token_ids)
    assert params["speculation"] == {"num_speculative_tokens": 4, "method": None}
    drafted = [step for step in trace.steps if step.request_id == output.request_id and step.nodes]
    assert {node.proposers for step in drafted for node in step.nodes} == {("prediction",)}
    assert max(len(step.nodes) for step in drafted) == 4
    assert llm.metrics()['paceline:spec_decode_num_accepted_tokens_per_drafter_total{drafter="prediction"}'] > 0
