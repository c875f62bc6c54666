"""What is noted of a request while it is answered: for the log, the metrics and the spans."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from paceline.serve.usage import num_output_tokens, total
from paceline.types import RequestOutput

KEY = "paceline.record"  # in the ASGI scope


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request."""

    method: str
    path: str
    started_at: float = field(default_factory=time.perf_counter)
    started_ns: int = field(default_factory=time.time_ns)  # since the epoch
    status: int = 0  # 0 = the client was gone before there was one
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    acceptance_length: float | None = None  # None = nothing was generated
    finish_reasons: tuple[str, ...] = ()
    left: bool = False  # the client, in mid-stream

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started_at

    def note(self, outputs: list[RequestOutput]) -> None:
        """The outputs that are there so far; called again, all of them."""
        self.num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        self.num_output_tokens = num_output_tokens(outputs)
        self.acceptance_length = total(outputs).acceptance_length
        self.finish_reasons = tuple(str(choice.finish_reason) for output in outputs for choice in output.outputs)

    def line(self) -> str:
        """For the log."""
        text = f"{self.method} {self.path} {self.status or 'disconnected'}"
        if self.acceptance_length is not None:
            reasons = ",".join(dict.fromkeys(self.finish_reasons))
            text += (
                f" {self.num_prompt_tokens}+{self.num_output_tokens} tokens,"
                f" acceptance length {self.acceptance_length:.2f}, {reasons}"
            )
        if self.left:
            text += ", client left"
        return f"{text}, {1e3 * self.seconds:.0f} ms"


def record_of(scope: Any) -> RequestRecord:
    """The record of a request, by its ASGI scope."""
    return scope[KEY]
