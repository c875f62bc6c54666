"""The progress bar of a batch: requests done, tokens, acceptance."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.types import RequestOutput, SpeculationMetrics


class BatchProgress:
    """Shows a bar on stderr; a context manager, told of each finished request."""

    def __init__(self, total: int, *, shown: bool) -> None:
        columns = (
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)
        self._task = self._progress.add_task("", total=total, rate="")
        self._started = time.perf_counter()
        self._tokens = 0
        self._metrics = SpeculationMetrics()

    def __enter__(self) -> BatchProgress:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def advance(self, output: RequestOutput) -> None:
        self._tokens += sum(len(c.token_ids) for c in output.outputs)
        self._metrics += output.metrics
        rate = f"{self._tokens / (time.perf_counter() - self._started):.0f} tokens/s"
        if self._metrics.num_drafts:
            rate += f", {self._metrics.acceptance_length:.2f} tokens a step"
        self._progress.update(self._task, advance=1, rate=rate)
