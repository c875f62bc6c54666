"""A client of OpenAI-compatible servers that costs little: on a machine of few cores it shares them with the server.

Streams /v1/completions over plain sockets and notes when what arrived. Needs the standard library only.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_LONGEST_LINE = 1 << 20  # bytes


@dataclass
class Answer:
    """A streamed completion. Times are of time.perf_counter()."""

    sent_at: float
    chunk_times: list[float] = field(default_factory=list)  # of the events with text
    text: str = ""
    num_tokens: int = 0

    @property
    def first_token_seconds(self) -> float:
        return self.chunk_times[0] - self.sent_at

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [b - a for a, b in zip(self.chunk_times, self.chunk_times[1:], strict=False)]

    @property
    def seconds_per_token(self) -> float:
        """After the first: an event may hold several tokens."""
        return (self.chunk_times[-1] - self.chunk_times[0]) / max(1, self.num_tokens - 1)


async def complete(port: int, body: dict[str, Any], answer: Answer | None = None) -> Answer:
    """Streams one completion into `answer`. Raises RuntimeError if the server refuses it or ends in an error."""
    answer = answer or Answer(time.perf_counter())
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LONGEST_LINE)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(payload)}"
        )
        writer.write(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + payload)
        answer.sent_at = time.perf_counter()
        async for event in _events(reader):
            now = time.perf_counter()
            if "error" in event:
                raise RuntimeError(f"the server failed: {event['error']}")
            if event.get("usage"):
                answer.num_tokens = event["usage"]["completion_tokens"]
            piece = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
            if piece:
                answer.text += piece
                answer.chunk_times.append(now)
        return answer
    finally:
        writer.close()


async def complete_all(port: int, bodies: Sequence[dict[str, Any]], *, concurrency: int) -> list[Answer]:
    """All of them, `concurrency` at any time; answers in the order of the bodies."""
    rest = iter(enumerate(bodies))
    answers: dict[int, Answer] = {}

    async def work() -> None:
        for index, body in rest:
            answers[index] = await complete(port, body)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return [answers[index] for index in range(len(bodies))]


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    status = await reader.readline()
    while (await reader.readline()).strip():
        pass
    if status.split()[1:2] != [b"200"]:
        raise RuntimeError(f"{status.decode().strip()}: {(await reader.read()).decode(errors='replace')[:1000]}")
    while line := await reader.readline():  # sizes of chunks stand on lines of their own, an event is one line
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[len(b"data: ") :])
