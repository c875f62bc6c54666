"""CacheManager driven at random against a naive model: each request's whole history, and a simulated pool of slots.

Every write goes to the slots that the manager gave, every read checks that they hold the request's own history. A
key stands for its token and all tokens before it, as real K/V does.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.cache.manager import CacheManager

Key = tuple[int, ...]  # a token with its whole prefix

# Two tokens, so that prefixes coincide often.
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=5)
GROWTH = st.lists(st.integers(0, 1), min_size=1, max_size=6)

somebody_runs = precondition(lambda self: self.known)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([4, 7, 12, 40]),
        block_size=st.sampled_from([1, 2, 4, 4]),
        prefix_caching=st.sampled_from([True, True, False]),
    )
    def start(self, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        self.cache = CacheManager(num_blocks=num_blocks, block_size=block_size, prefix_caching=prefix_caching)
        self.prefix_caching = prefix_caching
        self.pool: list[Key | None] = [None] * (num_blocks * block_size)
        self.known: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.texts: list[list[int]] = [[]]  # once computed
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"r{self.count}"

    def write(self, request: str, tokens: list[int], start: int) -> None:
        """Keys start.. of `tokens` go to their slots, which nobody else can see."""
        slots = self.cache.slots(request, start, len(tokens) - start).tolist()
        for other in self.known.keys() - {request}:
            visible = self.cache.slots(other, 0, self.computed[other]).tolist()
            assert not set(slots) & set(visible), "a write into another request's keys"
        for key, slot in zip(range(start, len(tokens)), slots, strict=True):
            self.pool[slot] = tuple(tokens[: key + 1])

    def copy(self, copies: list[tuple[int, int]]) -> None:
        size = self.cache.block_size
        held = [self.pool[src * size : (src + 1) * size] for src, _ in copies]
        for (_, dst), keys in zip(copies, held, strict=True):
            self.pool[dst * size : (dst + 1) * size] = keys

    def any_of(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(list(self.known)))

    @precondition(lambda self: len(self.known) < 5)
    @rule(data=st.data(), tokens=PROMPT)
    def arrive(self, data: st.DataObject, tokens: list[int]) -> None:
        """A prompt that may begin like an earlier text."""
        request, tokens = self.name(), data.draw(st.sampled_from(self.texts[-6:])) + tokens
        matched = self.cache.match_prefix(request, np.array(tokens, dtype=np.int32))
        assert matched % self.cache.block_size == 0
        assert matched <= len(tokens) - 1
        assert matched == 0 or self.prefix_caching
        self.known[request], self.computed[request] = tokens, matched

    @somebody_runs
    @rule(data=st.data(), grown=GROWTH, drafted=st.lists(st.integers(0, 1), max_size=6), accepted=st.integers(0, 6))
    def step(self, data: st.DataObject, grown: list[int], drafted: list[int], accepted: int) -> None:
        """Computes pending tokens and a draft; keeps part of it."""
        request = self.any_of(data)
        start, known = self.computed[request], self.known[request] + grown
        tokens = known + drafted
        room = self.cache.num_allocatable(request, num_computed=start)
        copies = self.cache.allocate(request, num_computed=start, num_new=len(tokens) - start)
        assert (copies is not None) == (len(tokens) - start <= room), "num_allocatable and allocate disagree"
        if copies is None:
            return
        self.copy(copies)
        self.write(request, tokens, start)
        end = len(known) + min(accepted, len(drafted))
        self.known[request] = tokens[:end]
        self.computed[request] = end
        self.texts.append(tokens[:end][:24])
        self.cache.commit(request, np.array(tokens[:end], dtype=np.int32), end)
        assert len(self.cache.block_table(request)) == -(-end // self.cache.block_size)

    @somebody_runs
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        """A draft model gives up tokens that it had committed."""
        request = self.any_of(data)
        kept = data.draw(st.integers(0, self.computed[request]))
        self.computed[request] = kept
        self.known[request] = self.known[request][:kept]
        self.cache.commit(request, np.array(self.known[request], dtype=np.int32), kept)

    @precondition(lambda self: 0 < len(self.known) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = self.any_of(data), self.name()
        shared = data.draw(st.integers(0, self.computed[parent]))
        self.cache.fork(parent, child, shared)
        self.known[child], self.computed[child] = self.known[parent][:shared], shared

    @somebody_runs
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = self.any_of(data)
        self.cache.free(request)
        del self.known[request], self.computed[request]

    @precondition(lambda self: self.count % 10 == 9)
    @rule()
    def reset(self) -> None:
        self.cache.reset_prefix_cache()

    @invariant()
    def every_request_reads_its_own_history(self) -> None:
        for request, count in self.computed.items():
            for key, slot in enumerate(self.cache.slots(request, 0, count).tolist()):
                assert self.pool[slot] == tuple(self.known[request][: key + 1]), f"{request}: wrong key {key}"

    @invariant()
    def every_count_is_right(self) -> None:
        self.cache.check_integrity()
        held = {block for request in self.known for block in self.cache.block_table(request).tolist()}
        assert self.cache.num_free_blocks == self.cache.num_blocks - len(held)

    def teardown(self) -> None:
        for request in list(self.known):
            self.cache.free(request)
        assert self.cache.num_free_blocks == self.cache.num_blocks
        self.cache.check_integrity()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None, derandomize=True)
