"""Read bandwidth: a plausible number from the extension and from NumPy, whatever size is asked for."""

from __future__ import annotations

import sys

import pytest

from paceline.bench import bandwidth


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_bytes", [0, 5_000_001])
def test_a_plausible_number(num_bytes, num_threads):
    assert 0.01 < bandwidth.read_bandwidth(num_bytes=num_bytes, num_threads=num_threads) < 1e5


def test_numpy_stands_in_for_the_extension(monkeypatch):
    monkeypatch.setitem(sys.modules, "paceline._native", None)
    monkeypatch.delattr("paceline._native", raising=False)
    assert 0.01 < bandwidth.read_bandwidth(num_bytes=1 << 22, num_threads=2) < 1e5


def test_a_buffer_is_as_large_as_was_asked_within_limits(monkeypatch):
    asked = []
    monkeypatch.setitem(sys.modules, "paceline._native", None)
    monkeypatch.delattr("paceline._native", raising=False)
    monkeypatch.setattr(bandwidth, "_numpy_bandwidth", lambda *args: asked.append(args) or 1.0)
    for num_bytes in (0, 1 << 25, 1 << 40):
        bandwidth.read_bandwidth(num_bytes=num_bytes, num_threads=2)
    assert asked == [(1 << 20, 2), (1 << 25, 2), (1 << 30, 2)]
