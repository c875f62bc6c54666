"""An engine for asyncio: a thread of its own steps, and requests come and go while it does."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from paceline.config import at_least
from paceline.engine.engine import Engine
from paceline.engine.request_stream import RequestStream
from paceline.engine.stats import EngineStats, FinishedRequest
from paceline.errors import ConfigError, EngineClosedError, EngineStepError, QueueFullError
from paceline.params import SamplingParams
from paceline.types import Delta, RequestOutput

_NUM_RECENT = 32  # ends of requests that tell how soon there is room in the queue
_LONGEST_WAIT_SECONDS = 60  # after which clients are to try again at the latest


class AsyncEngine:
    """Runs requests of one event loop on an engine, whose steps a thread of its own makes.

    Nobody else may use the engine from `start` to the end of `close`. A step that raises fails only the requests in
    it; a drafter that raises fails none. observer is called on the loop's thread with each request that has ended.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int = 256,
        observer: Callable[[FinishedRequest], None] | None = None,
    ) -> None:
        at_least("max_waiting", max_waiting, 1, example=256)
        self._engine = engine
        self._max_waiting = max_waiting
        self._observer = observer
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        # To the thread: each command returns the deltas that it causes
        self._commands: SimpleQueue[Callable[[], list[Delta]]] = SimpleQueue()
        # The thread's own
        self._drain_until: float | None = None  # time.perf_counter() at which the rest is aborted; None = not closing
        # The loop's own
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, RequestStream] = {}  # of the requests that are not over
        self._unscheduled: dict[str, RequestStream] = {}  # those of them that may wait for their first step
        self._num_preparing = 0
        self._closing = False
        self._ends: deque[float] = deque(maxlen=_NUM_RECENT)
        self._finished: Counter[str] = Counter()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0

    @property
    def alive(self) -> bool:
        """It takes requests and works on them."""
        return self._thread.is_alive() and not self._closing

    def start(self) -> None:
        """Starts the thread. Once it has been started, does nothing."""
        if self._thread.ident is None:
            self._thread.start()

    async def submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        deadline_seconds: float | None = None,
    ) -> RequestStream:
        """Queues a request; iterate over what this returns for its deltas.

        priority: lower goes first. deadline_seconds: from now on; what the request has by then is its output, with
        finish_reason "abort" and stop_reason "deadline". Raises QueueFullError if max_waiting requests wait for their
        first step, EngineClosedError after `close`, PromptError or ConfigError for a request that cannot be run.
        """
        arrived_at = time.perf_counter()
        _check_order(priority, deadline_seconds)
        self._enter(asyncio.get_running_loop())
        self._refuse_if_closed()
        self._refuse_if_full()
        self._num_preparing += 1
        try:
            # Not on the loop's thread: checks and masks of a long prompt or of many choices take their time
            request = await asyncio.to_thread(
                self._engine.new_request,
                token_ids,
                params,
                prompt=prompt,
                stream=True,
                priority=priority,
                deadline=None if deadline_seconds is None else arrived_at + deadline_seconds,
            )
        finally:
            self._num_preparing -= 1
        self._refuse_if_closed()
        stream = RequestStream(request, arrived_at=arrived_at, give_up=self._give_up)
        self._streams[request.id] = self._unscheduled[request.id] = stream
        self._commands.put(partial(self._add, stream))
        return stream

    async def close(self, drain_seconds: float = 30.0) -> None:
        """Takes no more requests, lets those that are there finish, and aborts what is left after drain_seconds.

        Every stream ends with an output before this returns. Called again, it can only shorten the time.
        """
        self._closing = True
        if self._thread.ident is None:
            drain_seconds = 0.0
        self._commands.put(partial(self._drain, time.perf_counter() + drain_seconds))
        self.start()  # if it never was, for its ending
        await asyncio.to_thread(self._thread.join)

    def stats(self) -> EngineStats:
        """Where the engine stands. Safe from any thread, and never waits for a step."""
        engine = self._engine
        scheduler, cache = engine.scheduler, engine.cache
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + self._commands.qsize(),
            kv_cache_usage=1.0 - cache.num_free_blocks / cache.num_blocks,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_prefix_cache_queries=scheduler.num_prefix_queries,
            num_prefix_cache_hits=scheduler.num_prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            finished=dict(self._finished),
            num_drafter_errors=0 if engine.drafting is None else engine.drafting.num_errors,
            speculation=engine.metrics,
        )

    # On the loop's thread

    def _enter(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serves this loop; what a loop that is closed has left is given up, for nobody will read it."""
        if self._loop is not None and self._loop.is_closed():
            for request_id in list(self._streams):
                self._give_up(request_id)
            self._unscheduled.clear()
        self._loop = loop

    def _refuse_if_closed(self) -> None:
        if self._closing:
            raise EngineClosedError("the engine takes no more requests, for it shuts down: ask another one.")

    def _refuse_if_full(self) -> None:
        self._unscheduled = {key: stream for key, stream in self._unscheduled.items() if stream.unscheduled}
        if len(self._unscheduled) + self._num_preparing >= self._max_waiting:
            seconds = self._seconds_until_begun()
            raise QueueFullError(
                f"{self._max_waiting} requests wait already, as many as may: try again in {seconds} s.",
                retry_after_seconds=seconds,
            )

    def _seconds_until_begun(self) -> int:
        """An estimate of when those that wait now will have begun: by then as many others must have ended."""
        if not self._ends:
            return 1
        now = time.perf_counter()
        recent = [end for end in self._ends if now - end < _LONGEST_WAIT_SECONDS]
        seconds_each = (now - recent[0]) / len(recent) if recent else _LONGEST_WAIT_SECONDS
        return min(_LONGEST_WAIT_SECONDS, max(1, math.ceil(seconds_each * self._max_waiting)))

    def _give_up(self, request_id: str) -> None:
        self._commands.put(partial(self._engine.abort, request_id))

    def _take(self, deltas: list[Delta], lost: list[str], error: BaseException | None, at: float) -> None:
        """What a step brought, to the streams that it belongs to."""
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            if delta.token_ids and not stream.num_tokens:
                self._num_prompt_tokens += len(stream.request.prompt_token_ids)
            self._num_generation_tokens += len(delta.token_ids)
            stream.put(delta, at=at)
            if delta.output is not None:
                self._end(stream, at=at, output=delta.output)
        for request_id in lost:
            stream = self._streams.get(request_id)
            if stream is not None:
                self._end(stream, at=at, cause=error)

    def _end(
        self,
        stream: RequestStream,
        *,
        at: float,
        output: RequestOutput | None = None,
        cause: BaseException | None = None,
    ) -> None:
        del self._streams[stream.request_id]
        self._unscheduled.pop(stream.request_id, None)
        self._ends.append(at)
        if output is not None:
            stream.end()
            self._finished.update(str(choice.finish_reason) for choice in output.outputs)
        else:
            failure = EngineStepError(f"a step failed ({type(cause).__name__}: {cause}), and this request with it.")
            failure.__cause__ = cause
            stream.end(error=failure)
            self._finished["error"] += len(stream.request.sequences)
        if self._observer is not None and self._loop is not None:  # by the loop, to which its errors are then known
            self._loop.call_soon(self._observer, stream.record(output, at=at))

    def _take_crash(self, error: BaseException) -> None:
        """The thread is at its end, though nobody closed it."""
        self._closing = True
        self._take([], list(self._streams), error, time.perf_counter())

    # On the engine's thread

    def _run(self) -> None:
        engine = self._engine
        drafting = engine.drafting
        if drafting is not None:
            drafting.skip_errors = True
        try:
            while self._step():
                pass
            rest = [d for key in list(engine.requests) for d in engine.abort(key, stop_reason="shutdown")]
            self._report(self._take, rest, [], None, time.perf_counter())
        except BaseException as error:  # whatever it is, nobody may wait for this thread
            self._report(self._take_crash, error)
            for request_id in list(engine.requests):
                engine.discard(request_id)
            raise
        finally:
            if drafting is not None:
                drafting.skip_errors = False

    def _step(self) -> bool:
        """Obeys the commands, sleeping while there is nothing to do, and makes a step. False = closed."""
        engine = self._engine
        deltas = self._obey(wait=not engine.has_unfinished and self._drain_until is None)
        deltas += engine.abort_overdue()
        lost, cause = [], None
        go_on = self._drain_until is None or (engine.has_unfinished and time.perf_counter() < self._drain_until)
        if go_on:
            try:
                deltas += engine.step()
            except Exception as error:
                lost, cause = engine.in_step, error
                for request_id in lost:
                    engine.discard(request_id)
        if deltas or lost:
            self._report(self._take, deltas, lost, cause, time.perf_counter())
        return go_on

    def _obey(self, *, wait: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while True:
            try:
                command = self._commands.get(block=wait)
            except Empty:
                return deltas
            deltas += command()
            wait = False

    def _add(self, stream: RequestStream) -> list[Delta]:
        self._engine.add(stream.request)
        return []

    def _drain(self, until: float) -> list[Delta]:
        self._drain_until = until if self._drain_until is None else min(until, self._drain_until)
        return []

    def _report(self, callback: Callable[..., None], *arguments: object) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed: nobody reads any more
            for request_id in list(self._engine.requests):
                self._engine.discard(request_id)
                self._streams.pop(request_id, None)


def _check_order(priority: object, deadline_seconds: object) -> None:
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise ConfigError(f"priority must be an integer; got {priority!r:.100}: 0 is usual, lower goes first.")
    if deadline_seconds is None:
        return
    if not isinstance(deadline_seconds, (int, float)) or isinstance(deadline_seconds, bool) or not deadline_seconds > 0:
        raise ConfigError(f"deadline_seconds must be a number above 0, or None; got {deadline_seconds!r:.100}: try 60.")
