"""Where one sequence stands in its grammar, and what the grammar makes of a draft."""

from __future__ import annotations

from typing import Literal

import numpy as np

from paceline.params import SamplingParams
from paceline.sampling.grammar import CompiledGrammar
from paceline.sampling.processors import allowed_mask, token_mask
from paceline.types import Draft

Status = Literal["open", "complete", "stuck"]


class GrammarState:
    """The place of one sequence in its grammar.

    status: "complete" when nothing can follow what was said, "stuck" when the grammar and the request's other
    parameters leave no token, or following it takes more than llguidance's limits; else "open". eos_ids: the tokens
    that end a text.
    """

    def __init__(
        self, grammar: CompiledGrammar, params: SamplingParams, *, eos_ids: frozenset[int], vocab_size: int
    ) -> None:
        self._path = _Path(grammar)
        self._grammar = grammar
        self._token_ids: list[int] = []
        self._ends = eos_ids | set(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        everything = np.packbits(np.ones(vocab_size, dtype=bool), bitorder="little")
        allowed = allowed_mask(params, vocab_size=vocab_size)
        banned = token_mask(params.banned_token_ids, vocab_size=vocab_size)
        ends = token_mask(self._ends, vocab_size=vocab_size)
        self._usual = (everything if allowed is None else allowed) & ~banned  # [ceil(V/8)] uint8, like all masks here
        self._early = self._usual & ~ends  # before min_tokens
        self._no_eos = everything & ~token_mask(eos_ids, vocab_size=vocab_size)
        self.status, self._allowed = self._look(0)

    def append(self, token_ids: list[int]) -> None:
        """Takes note of output tokens; one that ends the output is not part of the grammar's text."""
        for token_id in token_ids:
            if token_id not in self._ends:
                self._path.enter(token_id)
                self._token_ids.append(token_id)
        self.status, self._allowed = self._look(len(self._token_ids))

    def constrain(self, draft: Draft | None, *, limit: int) -> tuple[Draft | None, np.ndarray]:
        """The draft without what the target cannot sample, and the masks [1 + N, ceil(V/8)] uint8 of its rows.

        Gone are nodes that the grammar rules out, and nodes that end the output: the row before them samples such a
        token anyway, and nothing follows. Tokens that the grammar leaves no choice of, `limit` at most, take the place
        of a draft that does not begin with them: they are certain. None if no node is left. The sequence must be open.
        """
        forced = self._path.forced()[:limit] if limit else []
        if forced and (draft is None or not _has_path(draft, forced)):
            draft = Draft.chain(forced, source="grammar")
        if draft is None:
            return None, self._allowed[None]
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(draft.parents.tolist()):
            children.setdefault(parent, []).append(node)
        token_ids = draft.token_ids.tolist()
        masks: dict[int, np.ndarray] = {}

        def visit(parent: int, allowed: np.ndarray, length: int) -> None:
            for node in children.get(parent, ()):
                token_id = token_ids[node]
                if token_id in self._ends or not allowed[token_id >> 3] >> (token_id & 7) & 1:
                    continue
                step = self._path.enter(token_id)
                status, after = self._look(length + 1)
                if status == "open":
                    masks[node] = after
                    visit(node, after, length + 1)
                self._path.leave(step)

        visit(-1, self._allowed, len(self._token_ids))
        if self._path.failed:  # the draft led to where parsing takes too much: a text must not depend on that
            self._path = _Path(self._grammar)
            for token_id in self._token_ids:
                self._path.enter(token_id)
            return None, self._allowed[None]
        kept = sorted(masks)
        return draft.only(kept) if kept else None, np.stack([self._allowed, *(masks[node] for node in kept)])

    def _look(self, length: int) -> tuple[Status, np.ndarray]:
        """The status after `length` output tokens, and the mask of what may follow."""
        allowed = self._path.allowed()[: len(self._usual)]
        if not (allowed & self._no_eos).any():
            return "complete" if allowed.any() and not self._path.failed else "stuck", allowed
        allowed = allowed & (self._usual if length >= self._min_tokens else self._early)
        return "open" if allowed.any() and not self._path.failed else "stuck", allowed


def _has_path(draft: Draft, token_ids: list[int]) -> bool:
    """Whether these tokens are a path from the draft's root."""
    reached, length = {-1: 0}, 0
    for node, (token_id, parent) in enumerate(zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True)):
        depth = reached.get(parent, len(token_ids))
        if depth < len(token_ids) and token_id == token_ids[depth]:
            reached[node] = depth + 1
            length = max(length, depth + 1)
    return length == len(token_ids)


class _Path:
    """A way through a grammar that can be gone forwards and back, token by token."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._matcher = grammar.matcher()
        self._marker = grammar.marker
        self._known: bytes | None = None if grammar.marker is None else b""  # of the marker; None = behind it

    @property
    def failed(self) -> bool:
        return self._matcher.is_error()

    def enter(self, token_id: int) -> tuple[bytes | None, int]:
        """Goes one token on; what it returns leads back."""
        before, tokens = self._known, [token_id]
        if before is not None:
            assert self._marker is not None
            self._known, tokens = self._marker.follow(before, token_id)
        if tokens:
            self._matcher.consume_tokens(tokens)
        return before, len(tokens)

    def leave(self, step: tuple[bytes | None, int]) -> None:
        self._known, num_tokens = step
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def allowed(self) -> np.ndarray:
        """Bit mask [at least ceil(V/8)] uint8 of the tokens that may follow."""
        if self._known is not None:
            assert self._marker is not None
            return self._marker.allowed(self._known)
        return np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)

    def forced(self) -> list[int]:
        """The next tokens, as far as the grammar leaves no choice."""
        return self._matcher.compute_ff_tokens() if self._known is None else []
