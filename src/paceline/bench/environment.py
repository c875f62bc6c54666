"""The machine and the versions behind a figure; no names of hosts, users or folders."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

from paceline.config import usable_cores
from paceline.machine import cpu_fields

_PACKAGES = ("paceline", "numpy", "torch", "tokenizers", "transformers")
_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd", "sve", "i8mm")


def describe_environment() -> dict[str, Any]:
    """CPU, cores that this process may use, memory in bytes, operating system and package versions."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "instruction_sets": _instruction_sets(),
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": _versions(),
    }


def _cpu_model() -> str:
    return cpu_fields().get("model name") or platform.processor() or platform.machine()


def _instruction_sets() -> list[str]:
    fields = cpu_fields()
    present = (fields.get("flags") or fields.get("Features") or "").split()
    return [name for name in _INSTRUCTION_SETS if name in present]


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None  # not a POSIX system


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
