"""Which strings of a text occur how often, and what follows them: a suffix automaton that grows token by token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import cast

import numpy as np

from paceline.draft.extension import native

ROOT = 0  # the state of the empty string
NO_STATE = -1
SEPARATOR = -1  # stands between texts that share an automaton; not a token, so no text runs across it
_NO_TOKEN = -2
_MAX_FOLLOWERS = 64  # looked at after a string: a token that is frequent there is among the first to appear
_UNSEEN = 2.0  # over m: the weight, in occurrences, of tokens that never followed a string of m tokens


class SuffixAutomaton:
    """All substrings of the tokens appended so far, each in one state together with those that end at the same places.

    A state's strings are the suffixes of its longest one, of `length(state)` tokens, down to one more than that of
    `longest_suffix(state)`, whose strings are their further suffixes. Appending takes O(1) steps amortised (Blumer et
    al. 1985); a text of n tokens has at most 2n states and 3n transitions.

    Occurrences are counted as they come. Each token ends an occurrence of all suffixes of the text, which can be as
    many states as there are tokens (aaaa...), so only strings of at most `max_length` tokens are counted: at most that
    many states a token, whatever the text. Counts hold for states that have such a string.

    Six int32 a state and a dictionary for the states that several tokens follow.
    """

    def __init__(self, *, max_length: int) -> None:
        self.max_length = max_length
        self.num_tokens = 0
        self._lengths = array("i", [0])
        self._links = array("i", [NO_STATE])
        self._counts = array("i", [1])  # the empty string occurs before, between and after all tokens
        self._latest = array("i", [0])
        # Most states are followed by one token only. Further ones are in a dictionary of the state.
        self._first_tokens = array("i", [_NO_TOKEN])
        self._first_targets = array("i", [NO_STATE])
        self._more: dict[int, dict[int, int]] = {}
        self._last = ROOT  # the whole text
        self._suffix = ROOT  # its suffix of _suffix_length = min(num_tokens, max_length) tokens
        self._suffix_length = 0

    @property
    def num_states(self) -> int:
        return len(self._lengths)

    def length(self, state: int) -> int:
        """Tokens of the state's longest string."""
        return self._lengths[state]

    def longest_suffix(self, state: int) -> tuple[int, int]:
        """State and length of the longest suffix of the state's strings that also occurs elsewhere; not of the root."""
        link = self._links[state]
        return link, self._lengths[link]

    def count(self, state: int) -> int:
        """Occurrences of the state's strings."""
        return self._counts[state]

    def num_followed(self, state: int) -> int:
        """Occurrences of the state's strings that a token follows: all but one at the text's end."""
        return self._counts[state] - (self._latest[state] == self.num_tokens)

    def target(self, state: int, token: int) -> int:
        """The state of the state's strings with the token after them; NO_STATE if they never occur so."""
        if self._first_tokens[state] == token:
            return self._first_targets[state]
        more = self._more.get(state)
        return NO_STATE if more is None else more.get(token, NO_STATE)

    def followers(self, state: int, *, limit: int) -> list[tuple[int, int, int, int]]:
        """What follows the state's strings, the first `limit` tokens in order of appearance.

        For each (count, latest, token, target): occurrences of the strings with the token after them, the end of the
        latest, the token, and the state of the longer strings.
        """
        if self._first_targets[state] == NO_STATE:
            return []
        pairs = [(self._first_tokens[state], self._first_targets[state])]
        if state in self._more:
            pairs.extend(islice(self._more[state].items(), limit - 1))
        counts, latest = self._counts, self._latest
        return [(counts[target], latest[target], token, target) for token, target in pairs]

    def shorten(self, state: int, length: int, *, to: int) -> tuple[int, int]:
        """State and length of the suffix of at most `to` tokens of the state's string of `length` <= to + 1 tokens."""
        if length <= to:
            return state, length
        link = self._links[state]
        return (link if self._lengths[link] >= to else state), to

    def repeated_suffix(self) -> tuple[int, int]:
        """State and length of the longest suffix of the text, up to max_length tokens, that also occurs earlier."""
        if self._counts[self._suffix] > 1:
            return self._suffix, self._suffix_length
        return (ROOT, 0) if self._suffix == ROOT else self.longest_suffix(self._suffix)

    def find_suffix(self, tokens: Sequence[int]) -> tuple[int, int]:
        """State and length of the longest suffix of other tokens that occurs in the text."""
        state, length = ROOT, 0
        for token in tokens:
            while (target := self.target(state, token)) == NO_STATE and state != ROOT:
                state, length = self.longest_suffix(state)
            if target != NO_STATE:
                state, length = target, length + 1
        return state, length

    def grow(
        self, state: int, length: int, num_nodes: int, *, min_probability: float, chain: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """The num_nodes likeliest nodes after the state's string of `length` tokens, the likeliest first, none with a
        path less likely than min_probability: token_ids and parents [N] int32 and confidence [N], and the sum of the
        paths' probabilities. chain: only the likeliest follower of each."""
        token_ids: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        # (-probability of the path, -latest occurrence), then the node: the likeliest first, of equals the newest.
        frontier: list[tuple[float, int, int, float, int, int, int]] = []
        parent, path_probability, score = -1, 1.0, 0.0
        while len(token_ids) < num_nodes:
            while state != ROOT and self.num_followed(state) == 0:  # occurs at the text's end only
                state, length = self.longest_suffix(state)
            if state != ROOT:
                total = self.num_followed(state) + _UNSEEN / length
                followers = self.followers(state, limit=_MAX_FOLLOWERS)
                for count, latest, token, target in (max(followers),) if chain else followers:
                    probability = count / total
                    path = path_probability * probability
                    if path >= min_probability and token != SEPARATOR:
                        heappush(frontier, (-path, -latest, token, probability, parent, target, length + 1))
            if not frontier:
                break
            negative, _, token, probability, grown_from, state, length = heappop(frontier)
            path_probability = -negative
            score += path_probability
            parent = len(token_ids)
            token_ids.append(token)
            parents.append(grown_from)
            confidence.append(probability)
            state, length = self.shorten(state, length, to=self.max_length - 1)
        return (
            np.array(token_ids, dtype=np.int32),
            np.array(parents, dtype=np.int32),
            np.array(confidence, dtype=float),
            score,
        )

    def extend(self, tokens: Sequence[int]) -> None:
        """More tokens at the text's end."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        lengths, links, first_tokens = self._lengths, self._links, self._first_tokens
        self.num_tokens += 1
        new = self._new_state(self.num_tokens)
        state, target = self._last, NO_STATE
        while state != NO_STATE and (target := self.target(state, token)) == NO_STATE:
            if first_tokens[state] == _NO_TOKEN:
                first_tokens[state] = token
                self._first_targets[state] = new
            else:
                self._more.setdefault(state, {})[token] = new
            state = links[state]
        if state == NO_STATE:
            links[new] = ROOT
        elif lengths[target] == lengths[state] + 1:
            links[new] = target
        else:
            links[new] = self._split(target, state, token)
        self._last = new
        self._count_suffixes(token)

    def _new_state(self, length: int) -> int:
        self._lengths.append(length)
        self._links.append(ROOT)
        self._counts.append(0)
        self._latest.append(0)
        self._first_tokens.append(_NO_TOKEN)
        self._first_targets.append(NO_STATE)
        return len(self._lengths) - 1

    def _split(self, target: int, state: int, token: int) -> int:
        """Moves the strings of `target` that also end at the text's end to a state of their own, and returns it.

        They are those of `state`, and of the states that it links to, with the token after them.
        """
        clone = self._new_state(self._lengths[state] + 1)
        for values in (self._links, self._counts, self._latest, self._first_tokens, self._first_targets):
            values[clone] = values[target]
        if target in self._more:
            self._more[clone] = self._more[target].copy()
        self._links[target] = clone
        if target == self._suffix and self._suffix_length <= self._lengths[clone]:
            self._suffix = clone
        while state != NO_STATE and self.target(state, token) == target:
            if self._first_tokens[state] == token:
                self._first_targets[state] = clone
            else:
                self._more[state][token] = clone
            state = self._links[state]
        return clone

    def _count_suffixes(self, token: int) -> None:
        longer = self.target(self._suffix, token), self._suffix_length + 1
        self._suffix, self._suffix_length = self.shorten(*longer, to=self.max_length)
        links, counts, latest, state = self._links, self._counts, self._latest, self._suffix
        while state != NO_STATE:
            counts[state] += 1
            latest[state] = self.num_tokens
            state = links[state]


def check_integrity(automaton: SuffixAutomaton) -> None:
    """Recounts sizes and occurrences. Raises AssertionError if anything is off."""
    num_states, num_tokens = automaton.num_states, automaton.num_tokens
    assert num_states <= 2 * num_tokens + 1, f"{num_states} states of {num_tokens} tokens"
    for state in range(num_states):
        link, longest = automaton.longest_suffix(state) if state != ROOT else (NO_STATE, -1)
        assert longest < automaton.length(state), f"state {state} links to {link}, which is no shorter"
        if longest + 1 < automaton.max_length:
            followed = sum(count for count, *_ in automaton.followers(state, limit=num_states))
            assert followed == automaton.num_followed(state), f"state {state} is followed {followed} times"


def new_automaton(*, max_length: int) -> SuffixAutomaton:
    """The extension's where that is built: it does the same, and sooner."""
    if native is None:
        return SuffixAutomaton(max_length=max_length)
    return cast("SuffixAutomaton", native.SuffixAutomaton(max_length=max_length))
