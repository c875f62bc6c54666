"""CacheManager: each rule by example. test_cache_model.py drives it at random against a naive model."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.cache.blocks import BlockContent, BlockPool
from paceline.cache.manager import CacheManager


def tokens(count: int, *, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int32)


def run(cache: CacheManager, request_id: str, ids: np.ndarray, *, num_computed: int = 0) -> None:
    """Computes all of ids."""
    assert cache.allocate(request_id, num_computed=num_computed, num_new=len(ids) - num_computed) is not None
    cache.commit(request_id, ids, len(ids))
    cache.check_integrity()


def test_tables_of_one_request_are_contiguous_and_slots_follow_them():
    cache = CacheManager(num_blocks=8, block_size=4)
    run(cache, "a", tokens(10))
    assert cache.block_table("a").tolist() == [0, 1, 2]
    assert cache.slots("a", 3, 4).tolist() == [3, 4, 5, 6]
    assert cache.slots("a", 9, 1).tolist() == [9]
    assert cache.slots("a", 9, 1).dtype == np.int64
    assert cache.block_table("a").dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        cache.block_table("a")[0] = 1


def test_blocks_next_to_each_other_are_preferred():
    cache = CacheManager(num_blocks=8, block_size=4, prefix_caching=False)
    run(cache, "a", tokens(4))
    run(cache, "b", tokens(4))
    cache.free("a")
    run(cache, "b", tokens(12), num_computed=4)
    assert cache.block_table("b").tolist() == [1, 2, 3]


def test_lack_of_blocks_changes_nothing():
    cache = CacheManager(num_blocks=3, block_size=4)
    run(cache, "a", tokens(5))
    assert cache.num_allocatable("a", num_computed=5) == 7
    assert cache.allocate("a", num_computed=5, num_new=8) is None
    assert cache.allocate("b", num_computed=0, num_new=5) is None
    assert cache.num_free_blocks == 1
    assert cache.num_allocatable("b", num_computed=0) == 4
    assert cache.allocate("a", num_computed=5, num_new=7) == []
    with pytest.raises(KeyError):
        cache.block_table("b")
    cache.check_integrity()


def test_commit_frees_what_was_rolled_back():
    cache = CacheManager(num_blocks=4, block_size=4)
    cache.allocate("a", num_computed=0, num_new=13)
    cache.commit("a", tokens(13), 5)
    assert cache.block_table("a").tolist() == [0, 1]
    assert cache.num_free_blocks == 2
    cache.check_integrity()


def test_prefix_of_a_running_and_of_a_finished_request_is_found():
    cache = CacheManager(num_blocks=8, block_size=4)
    run(cache, "a", tokens(10))
    assert cache.match_prefix("b", tokens(9)) == 8
    assert cache.block_table("b").tolist() == [0, 1]
    cache.free("a")
    cache.free("b")
    assert cache.num_free_blocks == 8
    assert cache.match_prefix("c", tokens(8)) == 4  # one token at least stays pending
    assert cache.match_prefix("d", np.concatenate([tokens(4), tokens(8)])) == 4
    assert cache.match_prefix("e", tokens(8, start=1)) == 0
    cache.check_integrity()


def test_equal_hashes_are_not_taken_for_equal_tokens():
    pool = BlockPool(2)
    content = BlockContent.after(b"", b"tokens")
    block = pool.take()
    pool.publish(block, content)
    assert pool.find(content) == block
    assert pool.find(BlockContent(content.key, b"", b"others")) is None
    assert pool.find(BlockContent(content.key, b"parent", b"tokens")) is None


def test_kept_blocks_go_when_needed_longest_unused_first():
    cache = CacheManager(num_blocks=4, block_size=4)
    run(cache, "a", tokens(8))
    cache.free("a")
    run(cache, "b", tokens(8, start=100))
    cache.free("b")
    assert cache.num_free_blocks == 4
    run(cache, "c", tokens(4, start=200))  # takes the tail of a
    assert cache.match_prefix("d", tokens(9)) == 4
    assert cache.match_prefix("e", tokens(9, start=100)) == 8
    cache.check_integrity()


def test_without_prefix_caching_nothing_is_found():
    cache = CacheManager(num_blocks=8, block_size=4, prefix_caching=False)
    run(cache, "a", tokens(8))
    assert cache.match_prefix("b", tokens(9)) == 0
    assert len(cache.block_table("b")) == 0


def test_reset_forgets_contents_but_not_tables():
    cache = CacheManager(num_blocks=8, block_size=4)
    run(cache, "a", tokens(8))
    run(cache, "b", tokens(8, start=50))
    cache.free("b")
    cache.reset_prefix_cache()
    cache.check_integrity()
    assert cache.match_prefix("c", tokens(9)) == 0
    assert cache.match_prefix("d", tokens(9, start=50)) == 0
    assert cache.block_table("a").tolist() == [0, 1]


def test_forked_partial_block_is_copied_by_the_first_writer_only():
    cache = CacheManager(num_blocks=8, block_size=4)
    run(cache, "a", tokens(6))
    cache.fork("a", "b", 6)
    assert cache.block_table("b").tolist() == [0, 1]
    assert cache.allocate("b", num_computed=6, num_new=1) == [(1, 2)]
    assert cache.allocate("a", num_computed=6, num_new=1) == []
    assert cache.block_table("a").tolist() == [0, 1]
    assert cache.block_table("b").tolist() == [0, 2]
    cache.check_integrity()


def test_fork_at_a_block_boundary_needs_no_copy():
    cache = CacheManager(num_blocks=8, block_size=4)
    run(cache, "a", tokens(8))
    cache.fork("a", "b", 8)
    assert cache.allocate("b", num_computed=8, num_new=1) == []
    assert cache.allocate("a", num_computed=8, num_new=1) == []


def test_copy_on_write_counts_as_a_block():
    cache = CacheManager(num_blocks=2, block_size=4)
    run(cache, "a", tokens(6))
    cache.fork("a", "b", 6)
    assert cache.num_allocatable("b", num_computed=6) == 0
    assert cache.allocate("b", num_computed=6, num_new=1) is None
    cache.free("a")
    assert cache.num_allocatable("b", num_computed=6) == 2
    cache.check_integrity()


def test_block_that_is_written_again_is_no_longer_found_by_its_old_content():
    cache = CacheManager(num_blocks=8, block_size=4)
    run(cache, "a", tokens(8))
    cache.fork("a", "b", 6)  # shares block 1, which is full and findable, for two of its tokens
    cache.free("a")
    changed = np.concatenate([tokens(6), tokens(2, start=90)])
    run(cache, "b", changed, num_computed=6)
    assert cache.match_prefix("c", tokens(9)) == 4
    assert cache.match_prefix("d", np.append(changed, 1)) == 8


def test_blocks_after_a_rewritten_one_are_found_by_the_new_text():
    cache = CacheManager(num_blocks=8, block_size=4)
    run(cache, "a", tokens(8))
    cache.commit("a", tokens(6), 6)
    changed = np.concatenate([tokens(6), tokens(6, start=90)])
    run(cache, "a", changed, num_computed=6)
    assert cache.match_prefix("b", np.append(changed, 1)) == 12
    assert cache.match_prefix("c", np.concatenate([tokens(8), changed[8:], [1]])) == 4


def test_freeing_an_unknown_request_is_no_error():
    CacheManager(num_blocks=2).free("nobody")


def test_integrity_check_sees_a_lost_block():
    cache = CacheManager(num_blocks=4, block_size=4)
    run(cache, "a", tokens(6))
    del cache._tables["a"]
    with pytest.raises(AssertionError, match="references"):
        cache.check_integrity()
