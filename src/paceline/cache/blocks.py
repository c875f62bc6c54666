"""Blocks of the paged K/V pool: who may have one, who has it, and what it holds. Numbers only; no tensor is touched."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping
from dataclasses import dataclass

_HASH_BYTES = 16  # 128 bits


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a full block holds: its tokens, and by the chained hash everything before them."""

    key: bytes  # hash of parent and tokens
    parent: bytes  # key of the block before it, empty for the first
    tokens: bytes  # block_size int32

    @classmethod
    def after(cls, parent: bytes, tokens: bytes) -> BlockContent:
        """The content of the block that holds `tokens` and follows the block of key `parent`."""
        return cls(hashlib.blake2b(parent + tokens, digest_size=_HASH_BYTES).digest(), parent, tokens)


class BlockPool:
    """Refcounted blocks 0..num_blocks-1.

    A block is in exactly one of three states: free; referenced; or kept, which is unreferenced but findable by its
    content. When no block is free, the kept block that has been unreferenced longest is taken.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._contents: list[BlockContent | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._kept: dict[int, None] = {}  # insertion order: unreferenced longest first
        # The heap hands out low numbers first. A block that was taken out of the middle stays in it until it comes up.
        self._is_free = [True] * num_blocks
        self._in_heap = [True] * num_blocks
        self._heap = list(range(num_blocks))
        self._num_free = num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out: free or kept."""
        return self._num_free + len(self._kept)

    def references(self, block: int) -> int:
        """How many owners the block has."""
        return self._references[block]

    def take(self, *, after: int = -1) -> int:
        """A block with one reference; the one next to `after` where it is free, so that sequences stay contiguous.

        The caller has checked num_available.
        """
        block = after + 1
        if not (0 < block < self.num_blocks and self._is_free[block]):
            block = self._pop_free() if self._num_free else self._evict()
        if self._is_free[block]:
            self._is_free[block] = False
            self._num_free -= 1
        self._references[block] = 1
        return block

    def _pop_free(self) -> int:
        while True:
            block = heapq.heappop(self._heap)
            self._in_heap[block] = False
            if self._is_free[block]:
                return block

    def _evict(self) -> int:
        assert self._kept, "take() without an available block"
        block = next(iter(self._kept))
        del self._kept[block]
        self.forget(block)
        return block

    def claim(self, block: int) -> None:
        """One more reference to a referenced or kept block."""
        self._kept.pop(block, None)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One reference less. The last one leaves the block kept if it is findable, free otherwise."""
        assert self._references[block] > 0, f"block {block} released more often than claimed"
        self._references[block] -= 1
        if self._references[block] == 0:
            if self._contents[block] is not None:
                self._kept[block] = None
            else:
                self._make_free(block)

    def _make_free(self, block: int) -> None:
        self._is_free[block] = True
        self._num_free += 1
        if not self._in_heap[block]:
            self._in_heap[block] = True
            heapq.heappush(self._heap, block)

    def find(self, content: BlockContent) -> int | None:
        """The block that holds this content. Tokens and parent are compared: equal hashes are not taken for proof."""
        block = self._by_key.get(content.key)
        return block if block is not None and self._contents[block] == content else None

    def publish(self, block: int, content: BlockContent) -> None:
        """Makes a referenced block findable; one that holds what another block is known for stays private."""
        if content.key not in self._by_key:
            self._by_key[content.key] = block
            self._contents[block] = content

    def forget(self, block: int) -> None:
        """Makes a block unfindable, because it is about to be written."""
        content = self._contents[block]
        if content is not None:
            del self._by_key[content.key]
            self._contents[block] = None

    def forget_all(self) -> None:
        """Makes every block unfindable; kept blocks become free."""
        for block in range(self.num_blocks):
            self.forget(block)
        for block in self._kept:
            self._make_free(block)
        self._kept.clear()

    def check_integrity(self, owners: Mapping[int, int]) -> None:
        """Recounts everything. `owners` maps each block to its references as the tables have them.

        Raises AssertionError, saying what is wrong.
        """
        heap = set(self._heap)
        assert len(heap) == len(self._heap), "a block is twice in the heap"
        for block in range(self.num_blocks):
            count, expected = self._references[block], owners.get(block, 0)
            assert count == expected, f"block {block} counts {count} references, the tables hold {expected}"
            states = (self._is_free[block], block in self._kept, count > 0)
            assert sum(states) == 1, f"block {block} is (free, kept, referenced) = {states}"
            assert self._in_heap[block] == (block in heap), f"block {block} and the heap disagree"
            assert not self._is_free[block] or block in heap, f"free block {block} is not in the heap"
            content = self._contents[block]
            if content is None:
                assert block not in self._kept, f"kept block {block} cannot be found"
            else:
                assert self._by_key.get(content.key) == block, f"block {block} is not the one its key finds"
                assert not self._is_free[block], f"free block {block} is findable"
                assert content == BlockContent.after(content.parent, content.tokens), f"block {block} has a wrong key"
        assert self._num_free == sum(self._is_free), f"{sum(self._is_free)} blocks are free, {self._num_free} counted"
        findable = sum(content is not None for content in self._contents)
        assert len(self._by_key) == findable, f"{len(self._by_key)} keys for {findable} findable blocks"
