"""Suffix decoding: what followed the text's last words, wherever they were written before, weighed by how often."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paceline.draft.automaton import ROOT, SuffixAutomaton, new_automaton
from paceline.draft.suffix_store import SuffixStore
from paceline.interfaces import Drafter
from paceline.types import Draft, Observation, RequestView

MAX_LENGTH = 32  # tokens of the longest string that is counted, the guessed one included
_MAX_SUFFIXES = 2  # lengths tried in each automaton: a third gained nothing


class _Match(NamedTuple):
    """A suffix of the text that occurs in an automaton."""

    automaton: SuffixAutomaton
    state: int
    length: int  # tokens, less than MAX_LENGTH


class SuffixDrafter(Drafter):
    """Proposes a tree of what followed the text's longest repeated suffixes in prompt and output, and in past outputs.

    A string of m tokens with n followed occurrences, c of them by some token, gives that token the probability
    c / (n + 2 / m): the 2 / m, fitted on greedy text, is for tokens never seen there. From a suffix of m tokens grows,
    best first, a tree of at most factor * m + offset nodes, each with a path of at least min_probability; the best of
    two suffix lengths, by the sum of the paths' probabilities, is proposed. What a node is followed by is looked up for
    the suffix with the path to the node, so a copy that reaches the text's end goes on with itself.

    chain: only the likeliest follower of each node. store_tokens: how much of past outputs, of all requests, is kept
    (SuffixStore); 0 = nothing. A request's own text takes about 100 bytes a token, the store's as much.
    Raises ConfigError if store_tokens is 1 to 3. Source: SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975).
    """

    name = "suffix"

    def __init__(
        self,
        *,
        factor: float = 4.0,
        offset: float = 0.0,
        min_probability: float = 0.25,
        chain: bool = False,
        store_tokens: int = 0,
    ) -> None:
        self._factor = factor
        self._offset = offset
        self._min_probability = min_probability
        self._chain = chain
        self.store = SuffixStore(max_tokens=store_tokens, max_length=MAX_LENGTH) if store_tokens else None
        self._texts: dict[str, _Text] = {}
        self.remembers = self.store is not None
        self.catches_up = self.store is None  # which wants the last tokens, too

    def propose(self, views: Sequence[RequestView], budgets: Sequence[int]) -> list[Draft | None]:
        return [self._draft(self._follow(view), budget) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, step: Observation) -> None:
        """Notes the step's tokens for the store: there is no view of a request after its last step."""
        if self.store is None:
            return
        for i, view in enumerate(step.views):
            text = self._texts.get(view.request_id)
            if text is not None and len(text.token_ids) == len(view.token_ids):
                text.extend(step.emitted(i))

    def release(self, request_id: str) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None and self.store is not None:
            self.store.add(request_id, text.token_ids[text.prompt_length :])

    def _follow(self, view: RequestView) -> _Text:
        """The request's text with all tokens of the view, begun anew if these do not go on from those known."""
        text = self._texts.get(view.request_id)
        if text is None or not text.is_prefix_of(view.token_ids):
            text = self._texts[view.request_id] = _Text(view.prompt_length)
        text.extend(view.token_ids[len(text.token_ids) :].tolist())
        return text

    def _draft(self, text: _Text, budget: int) -> Draft | None:
        best: Draft | None = None
        score = 0.0  # expected number of accepted nodes
        matches = [match for longest in self._longest_matches(text) for match in _suffixes(longest)]
        for automaton, state, length in sorted(matches, key=lambda match: -match.length):
            num_nodes = min(budget, int(self._factor * length + self._offset))
            if num_nodes <= score:  # what is left cannot be better
                break
            *nodes, own_score = automaton.grow(
                state, length, num_nodes, min_probability=self._min_probability, chain=self._chain
            )
            if own_score > score:
                token_ids, parents, confidence = nodes
                best, score = Draft(token_ids, parents, confidence=confidence, source=self.name), own_score
        return best

    def _longest_matches(self, text: _Text) -> Iterator[_Match]:
        own = text.automaton
        yield _context(own, *own.repeated_suffix())
        if self.store is not None:
            tail = text.token_ids[-(MAX_LENGTH - 1) :]  # followed anew each time: the store changes in between
            for automaton in self.store.automata:
                yield _context(automaton, *automaton.find_suffix(tail))


class _Text:
    """Tokens of a request, and their automaton."""

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self.token_ids: array[int] = array("i")
        self.automaton = new_automaton(max_length=MAX_LENGTH)

    def is_prefix_of(self, token_ids: np.ndarray) -> bool:
        return self.token_ids.tobytes() == token_ids[: len(self.token_ids)].tobytes()

    def extend(self, token_ids: list[int]) -> None:
        self.token_ids.extend(token_ids)
        self.automaton.extend(token_ids)


def _context(automaton: SuffixAutomaton, state: int, length: int) -> _Match:
    """The suffix of a string that leaves room for one more token in what is counted."""
    return _Match(automaton, *automaton.shorten(state, length, to=MAX_LENGTH - 1))


def _suffixes(match: _Match) -> Iterator[_Match]:
    """The match and its suffixes with more occurrences, longest first; those in between have the same followers."""
    for _ in range(_MAX_SUFFIXES):
        if match.state == ROOT:
            break
        yield match
        match = _Match(match.automaton, *match.automaton.longest_suffix(match.state))
