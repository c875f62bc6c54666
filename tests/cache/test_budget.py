"""The memory that is free, from what a system and its control groups tell, and the blocks that it pays for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.cache import budget
from paceline.cache.budget import free_memory_bytes, plan_blocks
from paceline.config import CacheConfig
from paceline.errors import CacheError

MIB = 1 << 20
V1 = {"limit": "memory/memory.limit_in_bytes", "use": "memory/memory.usage_in_bytes", "cache": "total_inactive_file"}
V2 = {"limit": "memory.max", "use": "memory.current", "cache": "inactive_file"}


@pytest.fixture
def system(tmp_path, monkeypatch) -> Path:
    """A system that has 1000 MiB free and no control groups; the folder of its control groups."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal:  4096000 kB\nMemFree:  10 kB\nMemAvailable:  {1000 * 1024} kB\n")
    monkeypatch.setattr(budget, "_MEMINFO", meminfo)
    monkeypatch.setattr(budget, "_CGROUPS", tmp_path)
    return tmp_path


def write_group(root: Path, version: dict[str, str], *, limit: str, use_mib: int, cache_mib: int | None) -> None:
    folder = (root / version["limit"]).parent
    folder.mkdir(exist_ok=True)
    (root / version["limit"]).write_text(limit + "\n")
    (root / version["use"]).write_text(f"{use_mib * MIB}\n")
    if cache_mib is not None:
        (folder / "memory.stat").write_text(f"anon 5\nfile 7\n{version['cache']} {cache_mib * MIB}\nactive_file 3\n")


def test_without_control_groups(system):
    assert free_memory_bytes() == 1000 * MIB


@pytest.mark.parametrize("version", [V1, V2])
@pytest.mark.parametrize(
    ("limit_mib", "use_mib", "cache_mib", "free_mib"),
    [
        (500, 300, None, 200),
        (500, 300, 120, 320),  # page cache that is given back on demand counts as free
        (5000, 300, 120, 1000),  # the host has less than the group may take
        (500, 510, 5, 0),
    ],
)
def test_a_control_group_limits(system, version, limit_mib, use_mib, cache_mib, free_mib):
    write_group(system, version, limit=str(limit_mib * MIB), use_mib=use_mib, cache_mib=cache_mib)
    assert free_memory_bytes() == free_mib * MIB


@pytest.mark.parametrize(("version", "limit"), [(V2, "max"), (V1, "9223372036854771712")])
def test_a_control_group_without_a_limit(system, version, limit):
    write_group(system, version, limit=limit, use_mib=300, cache_mib=10)
    assert free_memory_bytes() == 1000 * MIB


@pytest.mark.parametrize("text", [None, "MemTotal: 5 kB\n"])
def test_a_system_without_meminfo(system, monkeypatch, text):
    path = system / "other"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(budget, "_MEMINFO", path)
    pages = {"SC_AVPHYS_PAGES": 100, "SC_PHYS_PAGES": 400, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf_names", pages)
    monkeypatch.setattr(os, "sysconf", lambda name: pages[name])
    assert free_memory_bytes() == 100 * 4096
    del pages["SC_AVPHYS_PAGES"]  # as on macOS
    assert free_memory_bytes() == 400 * 4096


def plan(*, kv_cache_memory=None, max_model_len=1024, max_num_seqs=2, free_bytes=None) -> int:
    return plan_blocks(
        CacheConfig(kv_cache_memory=kv_cache_memory),
        bytes_per_block=1000, max_model_len=max_model_len, max_num_seqs=max_num_seqs, free_bytes=free_bytes,
    )  # fmt: skip


def test_blocks_that_a_budget_pays_for(system):
    assert plan(kv_cache_memory=99_999) == 99
    assert plan(kv_cache_memory=10**9) == 2 * 1024 // 16
    assert plan(kv_cache_memory=10**9, max_model_len=1025) == 2 * 65
    assert plan(max_num_seqs=10**6) == 1000 * MIB // 4 // 1000
    assert plan(free_bytes=40_000) == 10
    assert plan(free_bytes=40_000, kv_cache_memory=20_000) == 20


def test_one_short_sequence_needs_no_more_budget_than_others(system):
    assert plan(max_model_len=8, max_num_seqs=1) == 2


@pytest.mark.parametrize("options", [{"kv_cache_memory": 1999}, {"free_bytes": 7999}, {"free_bytes": 0}])
def test_a_budget_that_is_too_small(system, options):
    with pytest.raises(CacheError, match=r"pays for [01] blocks of 1,000; give kv_cache_memory at least 2,000\.$"):
        plan(**options)
