"""How many K/V blocks a memory budget pays for."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.config import CacheConfig
from paceline.errors import CacheError

_FREE_SHARE = 4  # by default one part in four of the memory that is free at load
_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_FILES = (  # limit, use, statistics, and the statistic of page cache that is given back on demand: v2, v1
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def free_memory_bytes() -> int:
    """Memory that this process could still take without swapping, within its container's limit if there is one.

    Where the system does not tell what is free (macOS), all that it has.
    """
    free = _statistic(_MEMINFO, "MemAvailable:")
    if free is None:
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    else:
        free *= 1024
    for limit, use, statistics, reclaimable in _CGROUP_FILES:
        try:
            room = int((_CGROUPS / limit).read_text()) - int((_CGROUPS / use).read_text())
        except (OSError, ValueError):  # no control group of this version, or "max": no limit
            continue
        free = min(free, room + (_statistic(_CGROUPS / statistics, reclaimable) or 0))
    return max(0, free)


def plan_blocks(
    config: CacheConfig, *, bytes_per_block: int, max_model_len: int, max_num_seqs: int, free_bytes: int | None = None
) -> int:
    """Blocks of the pool, two at least: what the budget pays for, at most what max_num_seqs full contexts need.

    free_bytes: free memory of the device that holds the pool; None = the host's. Raises CacheError if the budget does
    not pay for two blocks.
    """
    budget = config.kv_cache_memory
    if budget is None:
        budget = (free_memory_bytes() if free_bytes is None else free_bytes) // _FREE_SHARE
    affordable = budget // bytes_per_block
    if affordable < 2:
        raise CacheError(
            f"a KV budget of {budget:,} bytes pays for {affordable} blocks of {bytes_per_block:,}; "
            f"give kv_cache_memory at least {2 * bytes_per_block:,}."
        )
    return min(affordable, max(2, max_num_seqs * -(-max_model_len // config.block_size)))


def _statistic(path: Path, name: str) -> int | None:
    """The number behind a name in a file of lines "name number"; None where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)
