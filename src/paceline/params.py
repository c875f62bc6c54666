"""What a request may ask for: how its tokens are chosen, what its output must be, and what is drafted for it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import numpy as np

from paceline.errors import ConfigError

GrammarKind = Literal["json_object", "json_schema", "regex", "lark", "choice"]
MAX_GRAMMAR_CHARACTERS = 1 << 17
MAX_MARKER_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must be, from its first character to its last; `Grammar.json_schema({...})` and the like make one.

    A marker, such as "</think>", leaves what comes before its first occurrence free, the end of the output included.
    Whether the grammar itself can be read shows when a request is checked. Raises ConfigError, naming the field, for a
    value outside its rule.
    """

    kind: GrammarKind
    text: str = ""  # a JSON schema, a regular expression, a grammar in Lark's notation, or choices as a JSON list
    after: str | None = None  # the marker; None = the whole output follows the grammar

    def __post_init__(self) -> None:
        kinds = get_args(GrammarKind)
        _require(self.kind in kinds, self, "kind", f"one of {', '.join(kinds)}", "try json_schema")
        limit = MAX_GRAMMAR_CHARACTERS
        _require(_unicode(self.text), self, "text", "a text without lone surrogates", "replace what is none")
        _require(len(self.text) <= limit, self, "text", f"at most {limit} characters", "shorten it")
        _require(self.kind != "json_object" or not self.text, self, "text", "empty for json_object", "try json_schema")
        _require(
            self.after is None or (_unicode(self.after) and 1 <= len(self.after) <= MAX_MARKER_CHARACTERS),
            self, "after", f"None or 1 to {MAX_MARKER_CHARACTERS} characters", "try '</think>'",
        )  # fmt: skip

    @classmethod
    def json_object(cls, *, after: str | None = None) -> Grammar:
        """Any JSON object."""
        return cls("json_object", after=after)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, *, after: str | None = None) -> Grammar:
        """JSON that is valid against the schema, with the properties in its order."""
        return cls("json_schema", schema if isinstance(schema, str) else _json("schema", schema), after)

    @classmethod
    def regex(cls, pattern: str, *, after: str | None = None) -> Grammar:
        """A text that the whole of the expression matches (Rust's syntax: no look-around, no back-references)."""
        return cls("regex", pattern, after)

    @classmethod
    def lark(cls, text: str, *, after: str | None = None) -> Grammar:
        """A text of the context-free grammar in Lark's notation, whose first rule is `start`."""
        return cls("lark", text, after)

    @classmethod
    def choice(cls, choices: Iterable[str], *, after: str | None = None) -> Grammar:
        """One of these texts."""
        return cls("choice", _json("choices", _as_tuple(choices)), after)


PREDICTION = "prediction"  # the drafter that follows a request's own prediction


@dataclass(frozen=True, slots=True)
class RequestSpeculation:
    """What one request takes of the engine's speculation. `parse` reads JSON's values.

    Raises ConfigError, naming the field, for a value outside its rule.
    """

    num_speculative_tokens: int | None = None  # nodes of a draft at most; None = as many as the engine drafts
    method: str | None = None  # the only drafter that may draft, by its name; None or "auto" = all, "none" = none

    def __post_init__(self) -> None:
        cap, method = self.num_speculative_tokens, self.method
        _require(
            cap is None or (_whole(cap) and cap >= 1),
            self, "num_speculative_tokens", "None or an integer >= 1", 'take method "none" to draft nothing',
        )  # fmt: skip
        _require(
            method is None or (isinstance(method, str) and method),
            self, "method", "None or a drafter's name", "leave it out for all of the engine's",
        )  # fmt: skip
        _require(
            cap is None or method != "none",
            self, "num_speculative_tokens", 'left out with method "none"', "nothing is drafted",
        )  # fmt: skip

    def allows(self, drafter: str) -> bool:
        """This drafter may draft for the request."""
        return self.method in (None, "auto", drafter)

    @classmethod
    def parse(cls, value: bool | Mapping[str, Any] | RequestSpeculation) -> bool | RequestSpeculation:
        """From true, false, or an object such as {"method": "ngram", "num_speculative_tokens": 3}.

        Raises ConfigError for anything else, and for an unknown key.
        """
        if isinstance(value, (bool, RequestSpeculation)):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"speculation of a request must be true, false or an object; got {value!r:.100}.")
        known = sorted(f.name for f in fields(cls))
        unknown = sorted(set(value) - set(known), key=str)
        if unknown:
            raise ConfigError(f"speculation of a request has no option {unknown[0]!r}; it has {', '.join(known)}.")
        return cls(**value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and where it ends. Frozen; the defaults are greedy.

    Raises ConfigError, naming the field, for a value outside its rule.
    """

    temperature: float = 0.0  # 0 = greedy; otherwise logits are divided by it
    top_k: int = 0  # keep the k most likely tokens; 0 = all
    top_p: float = 1.0  # keep the smallest set of tokens that holds this probability
    min_p: float = 0.0  # drop tokens less likely than min_p times the likeliest
    repetition_penalty: float = 1.0  # over prompt and output: positive logits divided, negative multiplied
    presence_penalty: float = 0.0  # over output: subtracted once from each token present
    frequency_penalty: float = 0.0  # over output: subtracted once per occurrence
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> added to its logit, -100..100
    allowed_token_ids: tuple[int, ...] | None = None  # only these tokens can be sampled
    banned_token_ids: tuple[int, ...] = ()  # these tokens can never be sampled
    min_tokens: int = 0  # no end-of-text or stop token before this many output tokens
    max_tokens: int = 256  # output tokens at most
    stop: tuple[str, ...] = ()  # output ends before the first of these strings
    stop_token_ids: tuple[int, ...] = ()  # output ends with the first of these tokens
    ignore_eos: bool = False  # go on past the model's end-of-text tokens
    seed: int | None = None  # 64 bits; None = fresh random bits, recorded in the output
    n: int = 1  # choices per prompt
    logprobs: int | None = None  # report the emitted token's raw log-probability and the top N; None = off
    prompt_logprobs: int | None = None  # the same for each prompt token
    skip_special_tokens: bool = True  # leave special tokens out of the text
    grammar: Grammar | None = None  # what the output must be; None = anything
    speculation: bool | RequestSpeculation = True  # False = decode plainly, whatever the engine's drafter
    prediction: tuple[int, ...] = ()  # tokens that the output will resemble, to draft from; unread where nothing drafts
    step_details: bool = False  # deltas say what each step drafted, and what the target said of it

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "banned_token_ids", "allowed_token_ids", "prediction"):
            value = getattr(self, name)
            if value is not None or name != "allowed_token_ids":
                object.__setattr__(self, name, _as_tuple(value))
        _require(
            _finite(self.temperature) and (self.temperature == 0 or 1e-6 <= self.temperature <= 100),
            self,
            "temperature",
            "0 or in [1e-6, 100]",
            "0 is greedy",
        )
        _require(
            _whole(self.top_k) and 0 <= self.top_k < 2**31, self, "top_k", "an integer in 0..2^31-1", "0 keeps all"
        )
        _require(_finite(self.top_p) and 0 < self.top_p <= 1, self, "top_p", "in (0, 1]", "1 keeps all tokens")
        _require(_finite(self.min_p) and 0 <= self.min_p <= 1, self, "min_p", "in [0, 1]", "0 switches it off")
        _require(
            _finite(self.repetition_penalty) and 0.01 <= self.repetition_penalty <= 100,
            self, "repetition_penalty", "in [0.01, 100]", "1 switches it off",
        )  # fmt: skip
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_finite(value) and -2 <= value <= 2, self, name, "in [-2, 2]", "0 switches it off")
        _require(
            isinstance(self.logit_bias, Mapping)
            and all(_token_id(t) and _finite(b) and -100 <= b <= 100 for t, b in self.logit_bias.items()),
            self, "logit_bias", "a map of token ids >= 0 to a bias in [-100, 100]", "ban a token with banned_token_ids",
        )  # fmt: skip
        for name in ("stop_token_ids", "banned_token_ids", "prediction"):
            _require(all(map(_token_id, getattr(self, name))), self, name, "integers >= 0", "name tokens by their ids")
        _require(
            self.allowed_token_ids is None or (self.allowed_token_ids and all(map(_token_id, self.allowed_token_ids))),
            self, "allowed_token_ids", "None or integers >= 0, at least one", "None allows all tokens",
        )  # fmt: skip
        _require(_whole(self.max_tokens) and self.max_tokens >= 1, self, "max_tokens", "an integer >= 1", "try 256")
        _require(
            _whole(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens,
            self, "min_tokens", "an integer in 0..max_tokens", "raise max_tokens or lower min_tokens",
        )  # fmt: skip
        _require(
            all(isinstance(s, str) and s for s in self.stop), self, "stop", "non-empty strings", "drop the empty one"
        )
        _require(
            self.seed is None or (_whole(self.seed) and 0 <= self.seed < 2**64),
            self, "seed", "an integer in 0..2^64-1, or None", "leave it out for a random one",
        )  # fmt: skip
        _require(_whole(self.n) and 1 <= self.n <= 128, self, "n", "an integer in 1..128", "1 is one choice")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or (_whole(value) and 0 <= value <= 100), self, name, "None or in 0..100", "try 5")
        for name in ("ignore_eos", "skip_special_tokens", "step_details"):
            _require(isinstance(getattr(self, name), bool), self, name, "True or False", "leave it out for the default")
        _require(
            self.grammar is None or isinstance(self.grammar, Grammar),
            self, "grammar", "None or a Grammar", "try Grammar.json_object()",
        )  # fmt: skip
        _require(
            not (self.grammar and self.ignore_eos), self, "ignore_eos", "False with a grammar", "it ends the output"
        )
        self._check_drafting()

    def _check_drafting(self) -> None:
        _require(
            isinstance(self.speculation, (bool, RequestSpeculation)),
            self, "speculation", "True, False or a RequestSpeculation", "leave it out for the default",
        )  # fmt: skip
        method = self.drafting.method
        if self.prediction and not (self.drafting.allows(PREDICTION) or method == "none"):
            raise ConfigError(
                f'a prediction is read with method "auto" or "prediction"; got {method!r:.100}: drop one.'
            )
        if method == PREDICTION and not self.prediction:
            raise ConfigError('method "prediction" drafts from a prediction, and there is none: give its token ids.')

    @property
    def drafting(self) -> RequestSpeculation:
        """`speculation`, with True and False spelled out."""
        if isinstance(self.speculation, RequestSpeculation):
            return self.speculation
        return _ALL_DRAFTERS if self.speculation else _NO_DRAFTER

    @property
    def speculates(self) -> bool:
        """Drafts may be made for this request."""
        return self.drafting.method != "none"

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _finite(value: object) -> bool:
    """A number that a float can hold."""
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _token_id(value: object) -> bool:
    return _whole(value) and value >= 0  # type: ignore[operator]  # an integer


def _unicode(value: object) -> bool:
    return isinstance(value, str) and not any(0xD800 <= ord(character) < 0xE000 for character in value)


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} must be JSON ({error}): use dictionaries, lists, texts and numbers.") from error


def _as_tuple(value: object) -> tuple:
    """One value or several, or None; what is no collection stays one value, for the rules to refuse."""
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    if isinstance(value, np.ndarray):
        value = value.tolist()  # of Python's own numbers, which a trace can hold
    try:
        return tuple(value)  # type: ignore[arg-type]  # tried
    except TypeError:
        return (value,)


def _require(holds: object, owner: object, name: str, rule: str, remedy: str) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {rule}; got {getattr(owner, name)!r:.100}: {remedy}.")


_ALL_DRAFTERS, _NO_DRAFTER = RequestSpeculation(), RequestSpeculation(method="none")
