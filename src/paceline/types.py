"""The values that the parts of Paceline hand to each other.

Shapes: T tokens of a pass, M rows whose logits are wanted, N nodes of a draft, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np

from paceline.errors import ConfigError

FinishReason = Literal["stop", "length", "abort"]
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


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """The law q that each node of a chain was sampled from.

    probs [N, K] float64, each row sums to 1; ids [K] the target's token ids of the columns, None = 0..V-1.
    """

    probs: np.ndarray
    ids: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposal for one request: a token tree. The root (the last known token) is not in it."""

    token_ids: np.ndarray  # [N] int32, parents before children
    parents: np.ndarray  # [N] int32, index of the parent node, -1 = root
    law: DraftLaw | None = None  # what the nodes were sampled from; None = deterministic
    confidence: np.ndarray | None = None  # [N] estimate that a node is accepted once its parent is
    source: str = ""  # the drafter's name
    proposers: tuple[tuple[str, ...], ...] | None = None  # [N] names of the drafters behind each node; None = source

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return self.parents.tolist() == list(range(-1, len(self.parents) - 1))

    def depths(self) -> np.ndarray:
        """[N] int32 of each node; 1 = child of the root."""
        depths = np.zeros(len(self), dtype=np.int32)
        for node, parent in enumerate(self.parents.tolist()):
            depths[node] = 1 if parent < 0 else depths[parent] + 1
        return depths

    def ancestors(self) -> np.ndarray:
        """[N, N] bool: row i tells which nodes are on the path from the root to node i, itself included."""
        on_path = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                on_path[node] |= on_path[parent]
        return on_path

    def cut_after(self, ends: frozenset[int]) -> Draft:
        """The draft without what stands below these tokens, as nothing follows where they end the text. No law."""
        assert self.law is None, "a law's rows belong to all nodes"
        ids = self.token_ids.tolist()
        if ends.isdisjoint(ids):
            return self
        fertile, kept = {-1}, []  # nodes that may have children
        for node, parent in enumerate(self.parents.tolist()):
            if parent in fertile:
                if ids[node] not in ends:
                    fertile.add(node)
                kept.append(node)
        return self.only(kept)

    def only(self, nodes: list[int]) -> Draft:
        """The draft of these nodes, ascending, whose parents are among them. It has no law."""
        place = {-1: -1, **{node: index for index, node in enumerate(nodes)}}
        return Draft(
            token_ids=self.token_ids[nodes],
            parents=np.array([place[parent] for parent in self.parents[nodes].tolist()], dtype=np.int32),
            confidence=None if self.confidence is None else self.confidence[nodes],
            source=self.source,
            proposers=None if self.proposers is None else tuple(self.proposers[node] for node in nodes),
        )

    @classmethod
    def chain(cls, token_ids: np.ndarray | list[int], *, source: str, law: DraftLaw | None = None) -> Draft:
        """A tree of width one over token_ids [N]."""
        ids = np.asarray(token_ids, dtype=np.int32)
        return cls(token_ids=ids, parents=np.arange(-1, len(ids) - 1, dtype=np.int32), law=law, source=source)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification made of one draft."""

    path: tuple[int, ...]  # indices of the accepted nodes, root side first
    final_token: int  # the target's own token after the path
    kind: Literal["recovered", "bonus"]  # bonus: the path ended at a leaf; recovered: the draft had more


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Sparse changes to the raw logits of M rows, in rows of a CSR layout.

    Row i changes tokens ids[offsets[i]:offsets[i+1]] (no id twice in a row), in this order:
    z += bias (-inf bans); z = z / scale if z > 0 else z * scale; z -= penalty.
    """

    offsets: np.ndarray  # [M+1] int32
    ids: np.ndarray  # [K] int32
    bias: np.ndarray  # [K] float32
    scale: np.ndarray  # [K] float32, the repetition penalty, 1 = none
    penalty: np.ndarray  # [K] float32, presence + frequency * count


@dataclass(frozen=True, slots=True)
class TokenMap:
    """Another vocabulary, in whose ids a model's tokens are sampled: a drafter's tokens by the target's ids."""

    ids: np.ndarray  # [V] int32, the other vocabulary's id of each token of the model, -1 = none; no id twice
    size: int  # of the other vocabulary


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How each of the M logits rows of a pass is sampled. A row's token depends on this and its logits alone.

    With a token_map everything here and in the output, raw logits excepted, is in the map's ids: noise, adjustments,
    masks, laws. Tokens without an id there cannot be sampled, and a row that has none left gets the token -1.
    """

    temperature: np.ndarray  # [M] float32, 0 = greedy
    top_k: np.ndarray  # [M] int32, 0 = all
    top_p: np.ndarray  # [M] float32
    min_p: np.ndarray  # [M] float32
    seed: np.ndarray  # [M] uint64
    stream: np.ndarray  # [M] uint32, the choice among n
    position: np.ndarray  # [M] uint32, index in the sequence of the token being sampled
    purpose: np.ndarray  # [M] uint32, noise purpose | attempt << 3 (docs/noise.md)
    adjustments: Adjustments | None = None
    allowed: np.ndarray | None = None  # [M, ceil(V/8)] uint8 bit masks, little-endian bits; None = all allowed
    num_logprobs: int | None = None  # report raw log-probabilities: of the row's token, and the top N
    logprob_ids: np.ndarray | None = None  # [M] int32 token to report on instead of the sampled one; -1 = sampled
    num_successors: int = 0  # also return the ids of the best tokens of the raw logits, this many
    num_candidates: int = 0  # also return the ids of the best race scores, this many, at most 64
    token_map: TokenMap | None = None  # the ids that tokens are sampled in; None = the model's own
    want_logits: bool = False  # also return the raw logits
    want_laws: bool = False  # also return the laws after all processors


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Raw log-probabilities (before any processor) of M rows."""

    token: np.ndarray  # [M] float32, of the row's token
    rank: np.ndarray  # [M] int32, 1 = likeliest; ties count as not ahead
    top_ids: np.ndarray  # [M, N] int32, best first, lowest id first among ties
    top: np.ndarray  # [M, N] float32


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One packed pass: the tokens of R requests one after another, without padding.

    Request r owns tokens query_starts[r]:query_starts[r+1]. The key with index j < context_lengths[r] lives in slot
    block_tables[r][j // block_size] * block_size + j % block_size; the i-th own token of this pass has key index
    context_lengths[r] + i and is written to slots[...] before attention reads it.
    """

    token_ids: np.ndarray  # [T] int32
    positions: np.ndarray  # [T] int32, RoPE position; depth-based for tree nodes
    slots: np.ndarray  # [T] int64, KV slot of each token
    query_starts: np.ndarray  # [R+1] int32
    context_lengths: np.ndarray  # [R] int32, keys in the cache before this pass
    block_tables: list[np.ndarray]  # R arrays of int32 block ids that cover context and own tokens
    ancestors: list[np.ndarray | None]  # R times [n, n] bool, row i sees own token j (itself included); None = causal
    logit_rows: np.ndarray  # [M] int32, indices into the T tokens
    hidden_layers: tuple[int | str, ...] = ()  # i = entering layer i, L = leaving the last, "final" = after the norm
    layers: tuple[int, ...] | None = (
        None  # run these only, ascending; others pass states on, their K/V stay. None = all
    )


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a pass returns for its M wanted rows; a part that was not asked for is None."""

    token_ids: np.ndarray | None = None  # [M] int32, the sampled tokens
    logits: np.ndarray | None = None  # [M, V] float32, raw
    laws: np.ndarray | None = None  # [M, V] float64, after all processors
    logprobs: Logprobs | None = None
    successors: np.ndarray | None = None  # [M, k] int32, the best raw logits first, lowest id first among ties
    candidates: np.ndarray | None = None  # [M, k] int32, the best race scores first, so the token itself; -1 = no more
    candidate_scores: np.ndarray | None = (
        None  # [M, k] float32, their log race scores; of greedy rows logits below the best
    )
    hidden: dict[int | str, object] = field(default_factory=dict)  # layer -> [T, d], the runner's own array type


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a drafter may know of a request. token_ids is a read-only view: copy what must outlive the call."""

    request_id: str
    token_ids: np.ndarray  # [known] int32, prompt and output
    prompt_length: int
    params: SamplingParams
    seed: int
    stream: int
    attempt: int  # the request's speculative steps so far
    num_computed: int = 0  # tokens whose K/V is in the target's cache
    block_table: np.ndarray | None = None  # [blocks] int32 of that cache, valid during the call; None = no cache


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Raw log-probability of one token of a prompt or an output."""

    token_id: int
    logprob: float
    rank: int  # 1 = likeliest
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), best first


@dataclass(frozen=True, slots=True)
class Completion:
    """One choice of one request."""

    index: int  # the choice among n
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None  # None while it is running
    stop_reason: int | str | None = None  # the stop token or string that ended it; "grammar" = it left no token, abort
    logprobs: tuple[TokenLogprob, ...] | None = None
    origins: tuple[str, ...] = ()  # one a token: "accepted", "recovered", "bonus", or "plain" (no draft was there)


@dataclass(frozen=True, slots=True)
class SpeculationMetrics:
    """Counters of speculation over some steps. Root and final token are not counted as drafted or accepted, nor is the
    node with which an output ended: steps and accepted nodes add up to the output's tokens."""

    num_drafts: int = 0  # target steps that verified a draft
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()  # drafts whose position i was accepted
    num_steps: int = 0  # target steps that emitted tokens, drafted or not
    # By drafter's name; a node that several drafters proposed counts for each of them
    num_draft_tokens_per_drafter: Mapping[str, int] = field(default_factory=dict)
    num_accepted_tokens_per_drafter: Mapping[str, int] = field(default_factory=dict)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / steps: tokens that one target pass yields."""
        return 1.0 + self.num_accepted_tokens / self.num_steps if self.num_steps else 1.0

    @property
    def accepted_prediction_tokens(self) -> int:
        """Nodes from requests' predictions that were accepted."""
        return self.num_accepted_tokens_per_drafter.get(PREDICTION, 0)

    @property
    def rejected_prediction_tokens(self) -> int:
        """Nodes from requests' predictions that were drafted in vain; a token that was drafted anew counts again."""
        return self.num_draft_tokens_per_drafter.get(PREDICTION, 0) - self.accepted_prediction_tokens

    def __add__(self, other: SpeculationMetrics) -> SpeculationMetrics:
        mine, theirs = self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos
        width = max(len(mine), len(theirs))
        per_pos = tuple(a + b for a, b in zip(_pad(mine, width), _pad(theirs, width), strict=True))
        return SpeculationMetrics(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            per_pos,
            self.num_steps + other.num_steps,
            _sum(self.num_draft_tokens_per_drafter, other.num_draft_tokens_per_drafter),
            _sum(self.num_accepted_tokens_per_drafter, other.num_accepted_tokens_per_drafter),
        )


def _pad(values: tuple[int, ...], width: int) -> tuple[int, ...]:
    return values + (0,) * (width - len(values))


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one choice of a streamed request."""

    request_id: str
    index: int  # the choice among n
    text: str  # whole characters only; may be empty
    token_ids: tuple[int, ...]
    origins: tuple[str, ...]  # as in Completion
    output: RequestOutput | None = None  # the whole result, on the last delta of the request
    logprobs: tuple[TokenLogprob, ...] | None = None  # of these tokens; None if they were not asked for
    finish_reason: FinishReason | None = None  # on the last delta of the choice
    stop_reason: int | str | None = None  # as in Completion
    steps: tuple[Any, ...] = ()  # a TraceStep for each step, where the request wants step_details

    @staticmethod
    def joined(deltas: Sequence[Delta]) -> Delta:
        """Successive deltas of one choice, at least one, as the delta of a single longer step."""
        last = deltas[-1]
        if len(deltas) == 1:
            return last
        return replace(
            last,
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
            origins=tuple(chain.from_iterable(delta.origins for delta in deltas)),
            logprobs=None
            if last.logprobs is None
            else tuple(chain.from_iterable(delta.logprobs or () for delta in deltas)),
            steps=tuple(chain.from_iterable(delta.steps for delta in deltas)),
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a request has produced so far, or in the end."""

    request_id: str
    prompt: str | None  # None when token ids were given
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    seed: int  # the seed in force, also when none was given
    finished: bool
    lossless: bool  # False when a lossy verification rule was in force
    reproducible: bool  # True when the same seed gives the same text whatever the drafter does
    metrics: SpeculationMetrics
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # None for the first token, which has no row
    num_cached_tokens: int = 0  # prompt tokens whose K/V came from the prefix cache
    prefill_seconds: float = 0.0  # from the first scheduled step to the first output token
    decode_seconds: float = 0.0  # from the first output token to the last

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Output token ids of the first choice."""
        return self.outputs[0].token_ids
