"""`metrics` of a response: what speculation did, in sum and, where details are asked for, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.engine.counters import summary
from paceline.engine.trace import TraceStep
from paceline.serve.usage import total
from paceline.types import Delta, RequestOutput


def response_metrics(level: str | None, outputs: Sequence[RequestOutput], deltas: Sequence[Delta]) -> dict[str, Any]:
    """The field of a response, or of the last chunk of one, which has no deltas: its steps have gone out before."""
    if level in (None, "none") or not outputs:
        return {}
    metrics: dict[str, Any] = {
        "speculative_decoding": summary(total(outputs)),
        "lossless": all(output.lossless for output in outputs),
        "reproducible": all(output.reproducible for output in outputs),
        "seeds": [output.seed for output in outputs],
    }
    if level == "detailed" and deltas:
        metrics["steps"] = [step_json(step) for delta in deltas for step in delta.steps]
    return {"metrics": metrics}


def chunk_metrics(level: str | None, delta: Delta) -> dict[str, Any]:
    """The field of a chunk: the steps that it is the sum of."""
    if level != "detailed" or not delta.steps:
        return {}
    return {"metrics": {"steps": [step_json(step) for step in delta.steps]}}


def step_json(step: TraceStep) -> dict[str, Any]:
    """A step as in a trace, with the drafters and probabilities of the tokens and the fates of the nodes on top."""
    known = asdict(step)
    del known["request_id"], known["samples"]
    for token, source in zip(known["tokens"], [*step.path, None], strict=False):
        node = None if source is None else step.nodes[source]
        found = step.final if node is None else node
        token["logprob"] = None if found is None else found.logprob
        token["proposers"] = () if node is None else node.proposers
        token["confidence"] = None if node is None else node.confidence
    for node, fate in zip(known["nodes"], step.fates, strict=True):
        node["fate"] = fate
    return known
