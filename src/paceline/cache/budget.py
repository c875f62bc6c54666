"""How many K/V blocks a memory budget pays for."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.config import CacheConfig
from paceline.errors import CacheError

_FREE_SHARE = 4  # by default one part in four of the memory that is free at load


def free_memory_bytes() -> int:
    """Memory that this process could still take without swapping, within its container's limit if there is one."""
    free = _meminfo_available() or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return max(0, min(free, limit - used))
    except (OSError, ValueError):  # no control group, or "max": no limit
        return free


def plan_blocks(config: CacheConfig, *, bytes_per_block: int, max_model_len: int, max_num_seqs: int) -> int:
    """Blocks of the pool: what the budget pays for, at most what max_num_seqs full contexts need.

    Raises CacheError if the budget does not pay for two blocks.
    """
    budget = config.kv_cache_memory
    if budget is None:
        budget = free_memory_bytes() // _FREE_SHARE
    blocks = min(budget // bytes_per_block, max_num_seqs * -(-max_model_len // config.block_size))
    if blocks < 2:
        raise CacheError(
            f"a KV budget of {budget:,} bytes pays for {blocks} blocks of {bytes_per_block:,}; "
            f"give kv_cache_memory at least {2 * bytes_per_block:,}."
        )
    return blocks


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
