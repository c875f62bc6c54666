"""Doubles for tests of engines and plug-ins: a model that notices every mistake in its cache, a drafter that follows
a script, a tokenizer of single characters."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.errors import PromptError
from paceline.interfaces import Drafter, KVLayout
from paceline.sampling.sampler import sample_rows
from paceline.types import Draft, DraftLaw, ForwardBatch, ForwardOutput, RequestView, RowSampling

_MASK = 2**64 - 1
_MIX_TOKEN, _MIX_HISTORY, _MIX_SHIFT = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 29
_MAX_CACHED_ROWS = 1 << 16


class ToyModel:
    """A Runner without weights: a row's logits are a hash of the tokens it sees, equal to the bit in any packing.

    Its K/V pool stores each key's token, position and a hash of the tokens it was computed after. A pass gathers the
    keys of each row through block table and ancestor mask and raises AssertionError when they are not positions 0..n-1
    of one history: a wrong roll-back, move, slot, mask or prefix hit. Nor may a pass over all layers see a key that a
    pass over some of them wrote.

    order: the row depends on this many last tokens only, so that texts repeat and drafters are right at times; None =
    all. peakedness: standard deviation of the logits. drift: standard deviation of an own addition to the logits, which
    makes a draft model that agrees with ToyModel(seed=seed) more or less often. skip_drift: the same in passes over
    some layers only.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 32,
        seed: int = 0,
        order: int | None = None,
        peakedness: float = 2.0,
        drift: float = 0.0,
        skip_drift: float = 0.0,
        max_model_len: int = 512,
        num_blocks: int = 64,
        block_size: int = 16,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.kv = KVLayout(num_blocks=num_blocks, block_size=block_size, bytes_per_block=16 * block_size)
        self.weight_bytes = 0
        self.num_passes = 0
        self.num_tokens = 0  # of all passes
        self._seed = seed
        self._order = order
        self._peakedness = peakedness
        self._drift = drift
        self._skip_drift = skip_drift
        self._tokens = np.full(num_blocks * block_size, -1, dtype=np.int32)
        self._positions = np.full(num_blocks * block_size, -1, dtype=np.int32)
        self._histories = np.zeros(num_blocks * block_size, dtype=np.uint64)
        self._partial = np.zeros(num_blocks * block_size, dtype=bool)  # written by a pass over some layers only
        self._rows: dict[tuple[bool, tuple[int, ...]], np.ndarray] = {}

    def forward(self, batch: ForwardBatch, sampling: RowSampling | None = None) -> ForwardOutput:
        """One pass, as interfaces.Runner promises; hidden states are not to be had."""
        assert not batch.hidden_layers, f"ToyModel has no hidden layers {batch.hidden_layers}"
        self.num_passes += 1
        self.num_tokens += len(batch.token_ids)
        self._check_tokens(batch)
        logits = np.empty((len(batch.logit_rows), self.vocab_size), dtype=np.float32)
        wanted: dict[int, list[int]] = {}  # token of the pass -> rows of the output
        for index, token in enumerate(batch.logit_rows.tolist()):
            wanted.setdefault(token, []).append(index)
        for request in range(len(batch.context_lengths)):
            for token, row in self._run_request(batch, request, wanted):
                logits[wanted[token]] = row
        return ForwardOutput(logits=logits) if sampling is None else sample_rows(logits, sampling)

    def move(self, src_slots: np.ndarray, dst_slots: np.ndarray) -> None:
        """Copies keys between slots [K]; all sources are read before any destination is written."""
        assert len(np.unique(dst_slots)) == len(dst_slots), f"two keys are moved to one slot: {dst_slots}"
        for pool in (self._tokens, self._positions, self._histories, self._partial):
            pool[dst_slots] = pool[src_slots]

    def _check_tokens(self, batch: ForwardBatch) -> None:
        count = len(batch.token_ids)
        assert len(batch.positions) == len(batch.slots) == batch.query_starts[-1] == count, "a pass of unequal lengths"
        assert len(np.unique(batch.slots)) == count, f"two tokens of a pass share a slot: {batch.slots}"
        in_vocabulary = (batch.token_ids >= 0) & (batch.token_ids < self.vocab_size)
        assert in_vocabulary.all(), f"tokens outside 0..{self.vocab_size - 1}: {batch.token_ids[~in_vocabulary]}"
        assert batch.positions.max(initial=0) < self.max_model_len, f"a token beyond max_model_len {self.max_model_len}"

    def _run_request(
        self, batch: ForwardBatch, request: int, wanted: Mapping[int, list[int]]
    ) -> Iterable[tuple[int, np.ndarray]]:
        """Writes the request's keys; yields (token of the pass, logits [V]) for the wanted ones."""
        begin, end = int(batch.query_starts[request]), int(batch.query_starts[request + 1])
        context = int(batch.context_lengths[request])
        keys = np.arange(context + end - begin)
        size = self.kv.block_size
        slots = batch.block_tables[request][keys // size].astype(np.int64) * size + keys % size
        assert np.array_equal(slots[context:], batch.slots[begin:end]), "a token's slot is not the one in its table"
        self._tokens[slots[context:]] = batch.token_ids[begin:end]
        self._positions[slots[context:]] = batch.positions[begin:end]
        partial = batch.layers is not None
        self._partial[slots[context:]] = partial
        ancestors = batch.ancestors[request]
        if ancestors is None:
            self._write_chain(slots, context)
            visible = self._in_order(slots, partial=partial)
            for own in range(end - begin):
                if begin + own in wanted:
                    yield begin + own, self._logits(visible[: context + own + 1], partial=partial)
            return
        for own in range(end - begin):
            assert ancestors[own, own], f"node {own} does not see itself"
            seen = slots[np.concatenate([keys[:context], context + np.flatnonzero(ancestors[own])])]
            seen = seen[np.argsort(self._positions[seen], kind="stable")]
            assert seen[-1] == slots[context + own], f"node {own} is not the last one that it sees"
            before = int(self._histories[seen[-2]]) if len(seen) > 1 else 0
            self._histories[seen[-1]] = _mix(before, int(self._tokens[seen[-1]]))
            visible = self._in_order(seen, partial=partial)
            if begin + own in wanted:
                yield begin + own, self._logits(visible, partial=partial)

    def _write_chain(self, slots: np.ndarray, context: int) -> None:
        history = int(self._histories[slots[context - 1]]) if context else 0
        histories = []
        for token in self._tokens[slots[context:]].tolist():
            history = _mix(history, token)
            histories.append(history)
        self._histories[slots[context:]] = np.array(histories, dtype=np.uint64)

    def _in_order(self, slots: np.ndarray, *, partial: bool) -> np.ndarray:
        """The slots themselves, once it is certain that they hold positions 0..n-1 of one history."""
        assert partial or not self._partial[slots].any(), "a pass over all layers sees keys that lack some"
        positions = self._positions[slots]
        assert np.array_equal(positions, np.arange(len(slots))), f"a row sees positions {positions.tolist()}"
        histories, tokens = self._histories[slots], self._tokens[slots]
        before = np.concatenate([np.zeros(1, dtype=np.uint64), histories[:-1]])
        mixed = (before ^ (tokens + 1).astype(np.uint64) * np.uint64(_MIX_TOKEN)) * np.uint64(_MIX_HISTORY)
        wrong = np.flatnonzero(mixed ^ mixed >> np.uint64(_MIX_SHIFT) != histories)
        assert len(wrong) == 0, f"keys at positions {wrong.tolist()} were computed after other tokens"
        return slots

    def _logits(self, slots: np.ndarray, *, partial: bool) -> np.ndarray:
        words = (int(self._histories[slots[-1]]),)
        if self._order is not None:
            words = tuple(self._tokens[slots[-self._order :]].tolist())
        key = partial, words
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= _MAX_CACHED_ROWS:
                self._rows.clear()
            row = self._rows[key] = self._draw(words, drifts=(self._drift, self._skip_drift if partial else 0.0))
        return row

    def _draw(self, words: tuple[int, ...], *, drifts: tuple[float, ...]) -> np.ndarray:
        row = self._peakedness * np.random.default_rng([0, self._seed, *words]).standard_normal(self.vocab_size)
        for purpose, drift in enumerate(drifts, 1):
            if drift:
                row += drift * np.random.default_rng([purpose, self._seed, *words]).standard_normal(self.vocab_size)
        return row.astype(np.float32)


def _mix(history: int, token: int) -> int:
    mixed = ((history ^ ((token + 1) * _MIX_TOKEN & _MASK)) * _MIX_HISTORY) & _MASK
    return mixed ^ mixed >> _MIX_SHIFT


class ScriptedDrafter(Drafter):
    """A Drafter that proposes what a function of the view returns: a chain's tokens, a Draft, or None.

    A proposal beyond the budget is cut to its first nodes.
    """

    name = "scripted"

    def __init__(self, script: Callable[[RequestView], Draft | Sequence[int] | None]) -> None:
        self._script = script

    def propose(self, views: Sequence[RequestView], budgets: Sequence[int]) -> list[Draft | None]:
        return [self._draft(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _draft(self, view: RequestView, budget: int) -> Draft | None:
        proposal = self._script(view)
        if proposal is None or len(proposal) == 0:
            return None
        if not isinstance(proposal, Draft):
            proposal = Draft.chain(list(proposal), source=self.name)
        law, confidence = proposal.law, proposal.confidence
        return Draft(
            token_ids=proposal.token_ids[:budget],
            parents=proposal.parents[:budget],
            law=None if law is None else DraftLaw(law.probs[:budget], law.ids),
            confidence=None if confidence is None else confidence[:budget],
            source=proposal.source,
            proposers=None if proposal.proposers is None else proposal.proposers[:budget],
        )


class CharTokenizer:
    """A tokenizer with one token a character: 0 begins a text, 1 ends it, the alphabet follows.

    Encoding a character outside the alphabet raises PromptError.
    """

    bos_id = 0
    eos_ids = frozenset({1})
    has_chat_template = True
    special_ids = frozenset({0, 1})

    def __init__(self, alphabet: str = string.printable) -> None:
        self._texts = ["<bos>", "<eos>", *alphabet]
        self._ids = {text: index for index, text in enumerate(self._texts)}
        self.vocab_size = len(self._texts)
        self.fingerprint = hashlib.sha256("\0".join(self._texts).encode()).hexdigest()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        unknown = sorted(set(text) - self._ids.keys())
        if unknown:
            raise PromptError(f"CharTokenizer encodes its alphabet only; got {unknown[0]!r}: add it to the alphabet.")
        return [self.bos_id] * add_special_tokens + [self._ids[character] for character in text]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self._texts[i] for i in ids if not (skip_special_tokens and i in self.special_ids))

    def token_text(self, token_id: int) -> str:
        return self._texts[token_id]

    def token_bytes(self) -> list[bytes | None]:
        return [None if i in self.special_ids else text.encode() for i, text in enumerate(self._texts)]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        turns = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return turns + "assistant: " if add_generation_prompt else turns

    template_reads_tools = False

    def template_mentions(self, text: str) -> bool:
        return False
