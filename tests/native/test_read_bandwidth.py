"""read_bandwidth of the extension: threads more than lines, buffers smaller than a line, more memory than there is."""

from __future__ import annotations

import pytest

native = pytest.importorskip("paceline._native")


@pytest.mark.parametrize(("num_threads", "num_bytes"), [(1, 0), (1, 1), (3, 64), (2, 1000), (4, 1 << 20)])
def test_all_words_are_read(num_threads, num_bytes):
    assert native.read_bandwidth(num_threads, num_bytes) > 0  # 0 tells of a sum that is not the words' own


def test_more_memory_than_there_is():
    with pytest.raises(MemoryError):
        native.read_bandwidth(1, 1 << 60)
