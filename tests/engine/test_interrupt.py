"""Ctrl-C is held back until a step is over."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from paceline.engine.interrupt import deferred_interrupt


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """In a background job SIGINT is ignored, and so it is for Python."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_an_interrupt_is_raised_after_the_block() -> None:
    done: list[bool] = []

    def step() -> None:
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        step()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_block_can_ask_for_it_earlier() -> None:
    done: list[int] = []

    def steps() -> None:
        with deferred_interrupt() as raise_pending:
            for step in range(3):
                if step == 1:
                    signal.raise_signal(signal.SIGINT)
                done.append(step)
                raise_pending()

    with pytest.raises(KeyboardInterrupt):
        steps()
    assert done == [0, 1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_handlers_are_left_alone() -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)


def test_errors_pass_through() -> None:
    with pytest.raises(ValueError, match="inner"), deferred_interrupt():
        raise ValueError("inner")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
