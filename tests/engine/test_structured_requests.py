"""Requests with a grammar, alone and among others: texts are those of the definition, whatever is drafted."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from engine_scenarios import ALONE, Arrival, Setting, any_params, any_setting, arrivals, engine_of, play, toy
from paceline.errors import ConfigError
from paceline.params import Grammar, SamplingParams
from paceline.sampling.filters import laws
from paceline.testing import CharTokenizer, ToyModel
from paceline.types import RequestOutput, RowSampling
from toy_engine import PROMPT, TOKENIZER, make_engine, oracle, run

GRAMMARS = [
    Grammar.regex("(ab|ba){1,4}[.]"),
    Grammar.regex("[a-h]{3}( [a-h]{2,4})*[.]"),
    Grammar.lark('start: "a" start "b" | "c" | "d" start'),
    Grammar.choice(["abc", "abcde", "hefgab."]),
    Grammar.regex("[ab]+[.]", after="h"),
    Grammar.choice(["bad", "cab"], after=". "),
]
in_small_doses = settings(
    derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@st.composite
def params_with_grammars(draw: st.DrawFn) -> SamplingParams:
    params = draw(any_params())
    grammar = draw(st.sampled_from([None, *GRAMMARS]))
    if grammar is None:
        return params
    params = replace(params, grammar=grammar, ignore_eos=False)
    try:
        engine_of(toy(), setting=ALONE).check_request([2], params)
    except ConfigError:  # no token to begin with
        return replace(params, min_tokens=0, banned_token_ids=(), allowed_token_ids=None)
    return params


@settings(in_small_doses, max_examples=120)
@given(
    any_setting(("none", "right", "wrong", "tree", "mixed", "ngram", "suffix", "recycle", "draft_model", "hybrid")),
    arrivals(params_with_grammars()),
)
def test_whatever_is_drafted_the_text_is_that_of_plain_decoding(setting: Setting, plan: list[Arrival]) -> None:
    play(setting, plan)


def definition(params: SamplingParams, pattern: str, length: int) -> tuple[str, str | None]:
    """Plain decoding by the model's own rows, masked by the language of the pattern written out; its finish reason."""
    texts = {t for n in range(length + 1) for t in map("".join, product("abc.", repeat=n)) if re.fullmatch(pattern, t)}
    begun = {text[:n] for text in texts for n in range(len(text) + 1)}
    engine, text = make_engine(), ""
    (eos,) = TOKENIZER.eos_ids
    while True:
        following = [c for c in "abc." if text + c in begun]
        if not following:
            return text, "stop"
        allowed = [TOKENIZER.encode(c, add_special_tokens=False)[0] for c in following] + [eos] * (text in texts)
        step = replace(params, grammar=None, allowed_token_ids=tuple(allowed), max_tokens=1)
        (output,) = run(engine, [[*PROMPT, *TOKENIZER.encode(text, add_special_tokens=False)]], step)
        if output.token_ids[0] == eos:
            return text, "stop"
        text += TOKENIZER.decode(output.token_ids)
        if len(text) == params.max_tokens:
            return text, "stop" if not any(text + c in begun for c in "abc.") else "length"


@pytest.mark.parametrize("pattern", ["(ab|ba){1,2}[.]", "[abc]{2,4}", "a?b?c?[.]?", "(a|ab)(c|bc)"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_what_its_definition_says(pattern: str, temperature: float) -> None:
    for seed in range(12):
        for max_tokens in (3, 9):
            params = SamplingParams(
                temperature=temperature, seed=seed, max_tokens=max_tokens, grammar=Grammar.regex(pattern)
            )
            expected = definition(params, pattern, 5)
            (plain,) = run(make_engine(), [PROMPT], params)
            assert (plain.text, plain.outputs[0].finish_reason) == expected
            answer = [*PROMPT, *plain.token_ids]
            for tree in (False, True):
                (drafted,) = run(make_engine(oracle(answer, tree=tree)), [PROMPT], params)
                assert drafted.token_ids == plain.token_ids
                assert (drafted.text, drafted.outputs[0].finish_reason) == expected


def test_the_law_is_the_targets_masked_step_by_step() -> None:
    """A chi-square test over all texts of a small language, drafted for by a model that is often right."""
    tokenizer = CharTokenizer("ab")
    pattern, size = "(a|ba|bb){1,2}", 4
    model = ToyModel(vocab_size=size, seed=3, order=4, peakedness=1.0, max_model_len=16, num_blocks=800, block_size=2)
    texts = {t for n in range(5) for t in map("".join, product("ab", repeat=n)) if re.fullmatch(pattern, t)}
    begun = {text[:n] for text in texts for n in range(len(text) + 1)}

    def law(text: str) -> dict[str, float]:
        """Probability of each next character, "" = the end."""
        following = [*(c for c in "ab" if text + c in begun), *[""] * (text in texts)]
        history = (2, *tokenizer.encode(text, add_special_tokens=False))
        one, zero = np.ones(1, np.float32), np.zeros(1, np.uint32)
        plain = RowSampling(one, zero.astype(np.int32), one, one * 0, zero.astype(np.uint64), zero, zero, zero)
        row = laws(model._draw(history[-4:], drifts=())[None], plain)[0]
        weights = {c: row[tokenizer.encode(c, add_special_tokens=False)[0] if c else 1] for c in following}
        return {c: weight / sum(weights.values()) for c, weight in weights.items()}

    def probabilities(text: str, reached: float) -> dict[str, float]:
        if not any(text + c in begun for c in "ab"):
            return {text: reached}
        found: dict[str, float] = {}
        for c, p in law(text).items():
            found |= {text: reached * p} if c == "" else probabilities(text + c, reached * p)
        return found

    expected = probabilities("", 1.0)
    assert sum(expected.values()) == pytest.approx(1.0)
    engine = make_engine(
        lambda view: [2, 3, 3, 2][: 1 + len(view.token_ids) % 4],
        runner=model,
        tokenizer=tokenizer,
        max_num_seqs=100,
        max_num_batched_tokens=800,
    )
    counts: Counter[str] = Counter()
    for seed in range(60):
        params = SamplingParams(temperature=1.0, seed=seed, n=100, grammar=Grammar.regex(pattern))
        (output,) = run(engine, [[2]], params)
        counts.update(choice.text for choice in output.outputs)
    assert counts.keys() <= expected.keys()
    observed = [counts[text] for text in expected]
    assert chisquare(observed, [6000 * p for p in expected.values()]).pvalue > 1e-4


def one(params: SamplingParams, **options) -> RequestOutput:
    (output,) = run(make_engine(**options), [PROMPT], params)
    return output


def test_an_output_ends_where_nothing_can_follow() -> None:
    output = one(SamplingParams(max_tokens=9, min_tokens=5, grammar=Grammar.choice(["abc"])))
    assert (output.text, output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("abc", "stop", None)
    assert output.token_ids == tuple(TOKENIZER.encode("abc", add_special_tokens=False))
    ends_at_limit = one(SamplingParams(max_tokens=3, grammar=Grammar.choice(["abc"])))
    assert ends_at_limit.outputs[0].finish_reason == "stop"
    assert one(SamplingParams(max_tokens=2, grammar=Grammar.choice(["abc"]))).outputs[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [(), ("b.",)])
def test_text_and_stream_hold_the_last_token(stream: bool, stop: tuple[str, ...]) -> None:
    engine = make_engine()
    engine.add_request(PROMPT, SamplingParams(stop=stop, grammar=Grammar.choice(["abc"])), stream=stream)
    deltas = [delta for _ in range(4) if engine.has_unfinished for delta in engine.step()]
    assert deltas[-1].output is not None
    assert deltas[-1].output.text == "abc"
    assert not stream or "".join(delta.text for delta in deltas) == "abc"


def test_forced_text_is_drafted_by_the_grammar() -> None:
    output = one(SamplingParams(grammar=Grammar.choice(["abcdefgh"])), script=lambda view: None, num_draft_tokens=8)
    assert output.text == "abcdefgh"
    assert output.metrics.num_steps == 2
    assert output.metrics.num_accepted_tokens_per_drafter == {"grammar": 6}


def test_a_request_that_is_left_without_a_token_ends_alone() -> None:
    b = TOKENIZER.encode("b", add_special_tokens=False)[0]
    stuck = SamplingParams(grammar=Grammar.regex("a{2}b"), banned_token_ids=(b,), logprobs=1)
    others = [SamplingParams(grammar=Grammar.regex("a{2}b")), SamplingParams(temperature=1.0, seed=1)]
    for script in (None, oracle([*PROMPT, *TOKENIZER.encode("aab", add_special_tokens=False)])):
        output, *rest = run(make_engine(script), [PROMPT] * 3, [stuck, *others])
        (choice,) = output.outputs
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("aa", "abort", "grammar")
        assert [len(choice.token_ids), len(choice.logprobs or ())] == [2, 2]
        assert [choice.outputs[0].token_ids for choice in rest] == [one(params).token_ids for params in others]


def test_text_before_the_marker_is_the_one_without_a_grammar() -> None:
    for seed in range(10):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=40)
        free = one(params).text
        for marker in {free[3:5], free[5:6]} - {""}:
            output = one(replace(params, grammar=Grammar.regex("[a-c]{3}", after=marker)))
            end = free.index(marker) + len(marker)
            assert output.text[:end] == free[:end]
            assert re.fullmatch("[a-c]{3}", output.text[end:])


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_rules_on_laws_refuse_grammars(rule: str) -> None:
    with pytest.raises(ConfigError, match="a grammar needs the rule coupled"):
        make_engine(rule=rule).check_request(PROMPT, SamplingParams(grammar=Grammar.json_object()))


def test_refused_when_checked_and_not_in_flight() -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match=r"the grammar \(regex\) .* cannot be used"):
        engine.add_request(PROMPT, SamplingParams(grammar=Grammar.regex("(a")))
    a = TOKENIZER.encode("a", add_special_tokens=False)[0]
    with pytest.raises(ConfigError, match="leave no token to begin with"):
        engine.add_request(PROMPT, SamplingParams(grammar=Grammar.regex("a"), banned_token_ids=(a,)))
    assert not engine.has_unfinished
