"""The values that the parts of Paceline hand to each other.

Shapes: T tokens of a pass, M rows whose logits are wanted, N nodes of a draft, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import numpy as np

from paceline.params import PREDICTION, SamplingParams

FinishReason = Literal["stop", "length", "abort"]


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

    @property
    def claims(self) -> list[float]:
        """Of each node the drafter's confidence, and an even chance where it gives none."""
        return [0.5] * len(self) if self.confidence is None else self.confidence.tolist()

    def judged(self, emitted: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
        """Each node whose parent is in the text that followed: node, depth (0 = child of the root), whether it is,
        too. Verified or not: nodes compete for a place, and those that got none are judged as well."""
        depth_of = {-1: 0}  # of the children of nodes that the text reached
        for node, (token, parent) in enumerate(zip(self.token_ids.tolist(), self.parents.tolist(), strict=True)):
            depth = depth_of.get(parent, len(emitted))
            if depth < len(emitted):
                right = token == emitted[depth]
                if right:
                    depth_of[node] = depth + 1
                yield node, depth, right

    def depths(self) -> np.ndarray:
        """[N] int32 of each node; 1 = child of the root."""
        depths: list[int] = []
        for parent in self.parents.tolist():
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return np.array(depths, dtype=np.int32)

    def ancestors(self) -> np.ndarray:
        """[N, N] bool: row i tells which nodes are on the path from the root to node i, itself included."""
        count = len(self)
        rows: list[list[bool]] = []
        for node, parent in enumerate(self.parents.tolist()):
            rows.append(rows[parent].copy() if parent >= 0 else [False] * count)
            rows[node][node] = True
        return np.array(rows, dtype=bool).reshape(count, count)

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
class Load:
    """What a pass holds before anybody drafts."""

    num_sequences: int  # that get a token from it
    rows: int
    keys: int = 0  # of those sequences, one by one, the tokens before this pass, whose K/V it reads

    @property
    def only_decodes(self) -> bool:
        """Each row is the next one of a sequence: no prompt's tokens are in the pass."""
        return 0 < self.num_sequences == self.rows


@dataclass(frozen=True, slots=True)
class Observation:
    """What a step made of B requests, as drafters and controllers are told it."""

    views: Sequence[RequestView]  # as they were before the step
    drafts: Sequence[Draft | None]
    verdicts: Sequence[Verdict | None]  # None: nothing was sampled, as its prompt is not through
    hidden: Mapping[int | str, Any]  # of each layer that the drafter wants [T, d], the runner's own array type
    starts: np.ndarray  # [B+1]; request i owns rows starts[i]:starts[i+1] of hidden: pending tokens, then nodes
    # For each request the ids of the largest raw logits [1+N, k] int32, best first: row 0 of what follows the root,
    # row j + 1 of what follows node j, accepted or not. None where nothing was sampled, or where none are wanted.
    successors: Sequence[np.ndarray | None]
    seconds: float = 0.0  # of the pass

    @property
    def nodes_and_keys(self) -> tuple[int, int]:
        """Drafted nodes of the pass, and, node by node, the tokens computed before it."""
        sizes = [0 if draft is None else len(draft) for draft in self.drafts]
        return sum(sizes), sum(size * view.num_computed for size, view in zip(sizes, self.views, strict=True))

    def emitted(self, index: int) -> list[int]:
        """The tokens that the step gave request `index`, accepted ones and the final one."""
        draft, verdict = self.drafts[index], self.verdicts[index]
        if verdict is None:
            return []
        if draft is None or not verdict.path:
            return [verdict.final_token]
        drafted = draft.token_ids.tolist()
        return [*(drafted[node] for node in verdict.path), verdict.final_token]


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
