"""Block tables of the running requests: allocation, roll-back, prefix reuse and copy-on-write."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from paceline.cache.blocks import BlockContent, BlockPool

_FIRST_CAPACITY = 16  # blocks of a new table; doubled when full


@dataclass(slots=True)
class _Table:
    ids: np.ndarray = field(default_factory=lambda: np.empty(_FIRST_CAPACITY, dtype=np.int32))
    count: int = 0  # blocks in use, ids[:count]
    keys: list[bytes] = field(default_factory=list)  # content keys of the leading blocks that are full and hashed
    private: int = 0  # blocks from here on are surely this request's alone, and not findable

    def append(self, block: int) -> None:
        if self.count == len(self.ids):
            self.ids = np.concatenate([self.ids, np.empty_like(self.ids)])
        self.ids[self.count] = block
        self.count += 1


class CacheManager:
    """Gives each request the blocks for its keys. Key j of a request lives in block j // block_size of its table.

    All calls cost O(1) amortised per token. An unknown request_id is a KeyError, except where said otherwise.
    """

    def __init__(self, *, num_blocks: int, block_size: int = 16, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._pool = BlockPool(num_blocks)
        self._tables: dict[str, _Table] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated: free ones, and those that are only kept for their content."""
        return self._pool.num_available

    def match_prefix(self, request_id: str, token_ids: np.ndarray) -> int:
        """Registers a new request and claims the blocks that already hold its first tokens; tokens found.

        token_ids [known]. A multiple of block_size, and less than known: one token at least stays to be computed.
        """
        assert request_id not in self._tables, f"request {request_id} has a table already"
        table = self._tables[request_id] = _Table()
        if not self.prefix_caching:
            return 0
        parent = b""
        for index in range((len(token_ids) - 1) // self.block_size):
            content = BlockContent.after(parent, self._block_bytes(token_ids, index))
            block = self._pool.find(content)
            if block is None:
                break
            self._pool.claim(block)
            table.append(block)
            table.keys.append(content.key)
            parent = content.key
        table.private = table.count
        return table.count * self.block_size

    def allocate(self, request_id: str, *, num_computed: int, num_new: int) -> list[tuple[int, int]] | None:
        """Makes keys num_computed .. num_computed + num_new - 1 writable, in blocks that are this request's alone.

        Returns the (source, destination) block copies to perform, all at once, before the pass writes; None, with
        nothing changed, when blocks are lacking. An unknown request is registered.
        """
        table = self._tables.get(request_id) or _Table()
        pool, size = self._pool, self.block_size
        first, end = num_computed // size, -(-(num_computed + num_new) // size)
        assert first <= table.count, f"request {request_id} has {table.count} blocks, not {num_computed} computed keys"
        doubtful = range(first, min(end, table.count)) if first < table.private else ()
        shared = [i for i in doubtful if pool.references(int(table.ids[i])) > 1]
        if len(shared) + max(0, end - table.count) > pool.num_available:
            return None
        self._tables[request_id] = table
        copies = []
        for index in shared:
            source = int(table.ids[index])
            block = pool.take(after=int(table.ids[index - 1]) if index else -1)
            pool.release(source)
            table.ids[index] = block
            if index * size < num_computed:  # later blocks hold nothing that is kept
                copies.append((source, block))
        for index in doubtful:  # a roll-back may have led into blocks known for old contents
            pool.forget(int(table.ids[index]))
        if doubtful:
            del table.keys[first:]
        table.private = min(table.private, first) if end >= table.count else table.private
        while table.count < end:
            table.append(pool.take(after=int(table.ids[table.count - 1]) if table.count else -1))
        return copies

    def num_allocatable(self, request_id: str, *, num_computed: int) -> int:
        """Keys from num_computed on that `allocate` could make writable now."""
        table = self._tables.get(request_id) or _Table()
        available = self._pool.num_available
        first = num_computed // self.block_size
        for index in range(first, table.count) if first < table.private else ():
            if self._pool.references(int(table.ids[index])) > 1:
                if available == 0:
                    return max(0, index * self.block_size - num_computed)
                available -= 1
        return (table.count + available) * self.block_size - num_computed

    def block_table(self, request_id: str) -> np.ndarray:
        """The request's blocks: a read-only view [n] int32, valid until the request's next call."""
        table = self._tables[request_id]
        view = table.ids[: table.count]
        view.flags.writeable = False
        return view

    def slots(self, request_id: str, start: int, count: int) -> np.ndarray:
        """Slots of keys start .. start + count - 1: [count] int64."""
        table, size = self._tables[request_id], self.block_size
        assert start + count <= table.count * size, f"request {request_id} has no block for key {start + count - 1}"
        if start // size == (start + count - 1) // size:
            slot = int(table.ids[start // size]) * size + start % size
            return np.arange(slot, slot + count, dtype=np.int64)
        keys = np.arange(start, start + count, dtype=np.int64)
        return table.ids[keys // size] * np.int64(size) + keys % size

    def copy_slots(self, copies: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Source and destination slots [K] int64 of whole-block copies, as `Runner.move` takes them."""
        places = np.arange(self.block_size, dtype=np.int64)
        src, dst = np.array(copies, dtype=np.int64).T[:, :, None] * self.block_size + places
        return src.ravel(), dst.ravel()

    def commit(self, request_id: str, token_ids: np.ndarray, num_computed: int) -> None:
        """After a pass: the first num_computed keys hold token_ids [known]; all later ones are rolled back.

        Full blocks become findable by prefix, blocks without a computed key are freed.
        """
        table, size = self._tables[request_id], self.block_size
        keep, full = -(-num_computed // size), num_computed // size
        assert keep <= table.count, f"request {request_id} has {table.count} blocks, not {num_computed} computed keys"
        while table.count > keep:
            table.count -= 1
            self._pool.release(int(table.ids[table.count]))
        del table.keys[keep:]
        if not self.prefix_caching:
            return
        for index in range(len(table.keys), full):
            parent = table.keys[-1] if table.keys else b""
            content = BlockContent.after(parent, self._block_bytes(token_ids, index))
            self._pool.publish(int(table.ids[index]), content)
            table.keys.append(content.key)
        table.private = max(table.private, full)

    def fork(self, parent_id: str, child_id: str, num_tokens: int) -> None:
        """Registers a child that shares the parent's blocks of the first num_tokens keys."""
        assert child_id not in self._tables, f"request {child_id} has a table already"
        parent, child = self._tables[parent_id], _Table()
        count = -(-num_tokens // self.block_size)
        assert count <= parent.count, f"request {parent_id} has {parent.count} blocks, not {num_tokens} keys"
        for block in parent.ids[:count].tolist():
            self._pool.claim(block)
            child.append(block)
        child.keys = parent.keys[: num_tokens // self.block_size]
        child.private = count
        parent.private = max(parent.private, count)
        self._tables[child_id] = child

    def free(self, request_id: str) -> None:
        """Forgets the request and its claims; what is findable stays until its block is needed. Unknown: no-op."""
        table = self._tables.pop(request_id, None)
        if table is not None:
            # From the end, so that a long prefix loses its tail first when blocks are needed.
            for block in table.ids[: table.count][::-1].tolist():
                self._pool.release(block)

    def reset_prefix_cache(self) -> None:
        """Forgets all contents; running requests keep their blocks."""
        self._pool.forget_all()

    def check_integrity(self) -> None:
        """Recounts references, free blocks, contents and tables; AssertionError says what is wrong. For tests."""
        owners: Counter[int] = Counter()
        for request_id, table in self._tables.items():
            ids = table.ids[: table.count].tolist()
            assert len(set(ids)) == len(ids), f"request {request_id} has a block twice: {ids}"
            assert all(0 <= block < self.num_blocks for block in ids), f"request {request_id} has a wrong block: {ids}"
            assert len(table.keys) <= table.count, f"request {request_id} has more hashes than blocks"
            owners.update(ids)
        self._pool.check_integrity(owners)

    def _block_bytes(self, token_ids: np.ndarray, index: int) -> bytes:
        block = token_ids[index * self.block_size : (index + 1) * self.block_size]
        return np.asarray(block, dtype=np.int32).tobytes()
