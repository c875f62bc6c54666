"""Rules of SamplingParams, of its grammar and of its speculation."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.params import Grammar, RequestSpeculation, SamplingParams

NUMBERS = ["x", None, True, math.nan, math.inf, 10**400]  # no finite numbers
IDS = ["x", 1.5, [-1], [True], [1.0], ["x"], [None], [[1]], np.array([0.5]), np.array(0.5)]
WRONG = {
    "temperature": [*NUMBERS, -0.1],
    "top_k": ["x", None, True, -1, 1.0, 2**31],
    "top_p": [*NUMBERS, 0, 1.01],
    "min_p": [*NUMBERS, -0.1, 1.01],
    "repetition_penalty": [*NUMBERS, 0, -1],
    "presence_penalty": [*NUMBERS, -2.1, 2.1],
    "frequency_penalty": [*NUMBERS, -2.1, 2.1],
    "logit_bias": [None, 3, "x", [1, 2], [(1, 2.0)], {"1": 2.0}, {-1: 2.0}, {1.0: 2.0}, {True: 2.0}, {1: 101},
                   {1: -101}, {1: math.nan}, {1: "x"}, {1: None}],
    "allowed_token_ids": [*IDS, []],
    "banned_token_ids": IDS,
    "stop_token_ids": IDS,
    "min_tokens": ["x", None, True, -1, 1.0, 257],
    "max_tokens": ["x", None, True, 0, 8.0],
    "stop": ["", [""], ["a", ""], [1], 3, 1.5, b"ab", [None], True],
    "ignore_eos": [None, 1, "yes"],
    "seed": ["x", True, -1, 2**64, 1.0],
    "n": ["x", None, True, 0, 129, 2.0],
    "logprobs": ["x", True, -1, 101, 1.0],
    "prompt_logprobs": ["x", True, -1, 101, 1.0],
    "skip_special_tokens": [None, 0, "no"],
    "grammar": ["{}", {}, True, 1],
    "speculation": [None, 1, "ngram", {"method": "ngram"}],
    "prediction": IDS,
    "step_details": [None, 0, "no"],
}  # fmt: skip


def test_every_field_has_a_rule():
    assert set(WRONG) == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_values_outside_their_rule(name, value):
    with pytest.raises(ConfigError, match=rf"^{name} must be .*; got .*: .*\.$") as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "temperature": [0, 0.7, 5, np.float32(0.5)],
        "top_k": [0, 50, np.int32(7), 2**31 - 1],
        "top_p": [1e-6, 1, np.float64(0.9)],
        "min_p": [0, 1],
        "repetition_penalty": [0.1, 2],
        "presence_penalty": [-2, 2.0],
        "frequency_penalty": [-2, 2.0],
        "logit_bias": [{}, {0: -100, np.int64(5): 100.0}, {3: np.float32(1)}],
        "min_tokens": [0, 256, np.int64(3)],
        "max_tokens": [1, np.int64(9000)],
        "seed": [None, 0, 2**64 - 1, np.uint64(5), np.int64(5)],
        "n": [1, 128],
        "logprobs": [None, 0, 100],
        "prompt_logprobs": [None, 0, np.int32(5)],
    }.items(),
)
def test_values_within_their_rule(name, values):
    for value in values:
        given = {"max_tokens": 256, name: value}
        assert getattr(SamplingParams(**given), name) == value


@pytest.mark.parametrize("name", ["allowed_token_ids", "banned_token_ids", "stop_token_ids", "prediction"])
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (5, (5,)),
        (np.int64(5), (5,)),
        (0, (0,)),
        ([1, 2], (1, 2)),
        (range(3), (0, 1, 2)),
        (np.array([4, 5], np.int32), (4, 5)),
        ({7}, (7,)),
    ],
)
def test_ids_become_tuples(name, given, kept):
    assert getattr(SamplingParams(**{name: given}), name) == kept


def test_one_stop_or_several_or_none():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None, banned_token_ids=None, prediction=None) == SamplingParams()
    assert SamplingParams(allowed_token_ids=None).allowed_token_ids is None


@pytest.mark.parametrize(
    ("value", "drafting", "speculates"),
    [
        (True, RequestSpeculation(), True),
        (False, RequestSpeculation(method="none"), False),
        ({}, RequestSpeculation(), True),
        ({"method": "auto", "num_speculative_tokens": 3}, RequestSpeculation(3, "auto"), True),
        ({"method": "none"}, RequestSpeculation(method="none"), False),
        (RequestSpeculation(2), RequestSpeculation(2), True),
    ],
)
def test_speculation_of_a_request(value, drafting, speculates):
    params = SamplingParams(speculation=RequestSpeculation.parse(value))
    assert (params.drafting, params.speculates) == (drafting, speculates)


def test_a_request_chooses_one_drafter_all_or_none():
    chosen = {method: RequestSpeculation(method=method) for method in (None, "auto", "none", "ngram")}
    allowed = {method: [name for name in ("ngram", "suffix") if own.allows(name)] for method, own in chosen.items()}
    assert allowed == {None: ["ngram", "suffix"], "auto": ["ngram", "suffix"], "none": [], "ngram": ["ngram"]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "must be true, false or an object; got None"),
        (1, "must be true, false or an object; got 1"),
        ("ngram", "must be true, false or an object; got 'ngram'"),
        ([], "must be true, false or an object; got []"),
        ({"depth": 3}, "has no option 'depth'; it has method, num_speculative_tokens"),
        ({1: 3}, "has no option 1; it has"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be None or an integer >= 1; got 0"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens must be None or an integer >= 1; got True"),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens must be None or an integer >= 1; got 2.0"),
        ({"method": ""}, "method must be None or a drafter's name; got ''"),
        ({"method": ["ngram"]}, "method must be None or a drafter's name; got ['ngram']"),
        ({"method": "none", "num_speculative_tokens": 2}, 'must be left out with method "none"; got 2'),
    ],
)
def test_speculation_that_a_request_cannot_have(value, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        RequestSpeculation.parse(value)
    assert "\n" not in str(caught.value)


def test_a_prediction_and_the_drafter_that_reads_it():
    for method in (None, "auto", "none", "prediction"):
        params = SamplingParams(prediction=[5, 6], speculation=RequestSpeculation(method=method))
        assert params.prediction == (5, 6)
    with pytest.raises(ConfigError, match="'ngram': drop one"):
        SamplingParams(prediction=[5], speculation=RequestSpeculation(method="ngram"))
    with pytest.raises(ConfigError, match="there is none: give its token ids"):
        SamplingParams(speculation=RequestSpeculation(method="prediction"))


def test_greedy_and_penalties():
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=0.1).greedy
    assert not SamplingParams().has_penalties
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 0.5}).has_penalties


WRONG_GRAMMARS = [
    (lambda: Grammar("xml"), "kind must be one of json_object, json_schema, regex, lark, choice; got 'xml'"),  # type: ignore[arg-type]
    (lambda: Grammar("regex", "a" * 131073), "text must be at most 131072 characters"),
    (lambda: Grammar("regex", 3), "text must be a text without lone surrogates; got 3"),  # type: ignore[arg-type]
    (lambda: Grammar("regex", "\ud800"), "text must be a text without lone surrogates"),
    (lambda: Grammar("json_object", "{}"), "text must be empty for json_object"),
    (lambda: Grammar.regex("a", after=""), "after must be None or 1 to 64 characters"),
    (lambda: Grammar.regex("a", after="x" * 65), "after must be None or 1 to 64 characters"),
    (lambda: Grammar.json_schema({"const": {1}}), "schema must be JSON"),
    (lambda: Grammar.json_schema({"const": math.nan}), "schema must be JSON"),
    (lambda: SamplingParams(grammar=Grammar.regex("a"), ignore_eos=True), "ignore_eos must be False with a grammar"),
]


@pytest.mark.parametrize(("make", "message"), WRONG_GRAMMARS)
def test_wrong_grammars_are_refused(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_grammars_are_values():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert Grammar.json_schema(schema) == Grammar.json_schema('{"type": "object", "properties": {"b": {}, "a": {}}}')
    assert Grammar.choice(["a", "é"]).text == '["a", "é"]'
    assert Grammar.choice("ab") == Grammar.choice(["ab"])
    assert len({Grammar.regex("a"), Grammar.regex("a"), Grammar.regex("a", after="b")}) == 2
