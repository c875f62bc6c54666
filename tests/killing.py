"""kill -9 at the worst moment: while a file is being written."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_FORK = multiprocessing.get_context("fork")  # so that what a test has patched is so in the process that is killed


def kill_while_writing(
    write: Callable[[int], object], *, folder: Path, scratch: str, times: int = 6, seconds: float = 60.0
) -> Iterator[int]:
    """Has a process call write(0), write(1), ... and kills it as soon as it sees a file like `scratch` (a glob) in the
    folder, some calls later each time. Yields after each kill, when what is left can be looked at."""
    for attempt in range(times):
        done = _FORK.Value("i", 0)
        process = _FORK.Process(target=_write_on, args=(write, done))
        process.start()
        deadline = time.monotonic() + seconds
        while done.value < attempt or not any(folder.glob(scratch)):
            assert process.is_alive(), "the writer ended by itself"
            assert time.monotonic() < deadline, "no such file was ever seen"
        process.kill()
        process.join()
        yield attempt


def _write_on(write: Callable[[int], object], done: object) -> None:
    while True:
        write(done.value)  # type: ignore[attr-defined]
        done.value += 1  # type: ignore[attr-defined]
