"""How fast this machine reads memory: the floor under every pass, which has to read all weights."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

_MIN_BYTES, _MAX_BYTES = 1 << 20, 1 << 30
_PASSES = 9


def read_bandwidth(*, num_bytes: int, num_threads: int) -> float:
    """GB/s (1e9 bytes) that num_threads threads together read, from a buffer of about num_bytes.

    The buffer should be as large as what is compared with it: a small model's weights stay in a cache that a large
    one's do not fit into. It has between 1 MiB and 1 GiB.
    """
    num_bytes = min(max(num_bytes, _MIN_BYTES), _MAX_BYTES)
    try:
        from paceline import _native
    except ImportError:
        return _numpy_bandwidth(num_bytes, num_threads)
    return _native.read_bandwidth(num_threads, num_bytes)


def _numpy_bandwidth(num_bytes: int, num_threads: int) -> float:
    """The same by NumPy's sum, which lets other threads run; somewhat less than the machine can do."""
    parts = np.array_split(np.ones(num_bytes // 8, dtype=np.int64), num_threads)
    seconds = []
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(_PASSES):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            seconds.append(time.perf_counter() - start)
    return num_bytes / median(seconds) * 1e-9
