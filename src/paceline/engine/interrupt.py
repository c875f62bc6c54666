"""Ctrl-C between steps, never inside one: the cache is always in a state that can go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Holds a KeyboardInterrupt back until the block is done, or until it calls what it is given.

    Only where Ctrl-C would raise it: in the main thread, with Python's own handler in place.
    """
    pending: list[int] = []

    def raise_pending() -> None:
        if pending:
            pending.clear()
            raise KeyboardInterrupt

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield raise_pending
        return
    signal.signal(signal.SIGINT, lambda number, frame: pending.append(number))
    try:
        yield raise_pending
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    raise_pending()
