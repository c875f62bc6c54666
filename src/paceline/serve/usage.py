"""What a request used: `usage` of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.types import RequestOutput, SpeculationMetrics


def usage(outputs: Sequence[RequestOutput], *, scored_only: bool = False) -> dict[str, Any]:
    """OpenAI's `usage` over all prompts of a request. scored_only: the one token that each had to give was dropped."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = 0 if scored_only else num_output_tokens(outputs)
    metrics = total(outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": metrics.accepted_prediction_tokens,
            "rejected_prediction_tokens": metrics.rejected_prediction_tokens,
        },
    }


def num_output_tokens(outputs: Sequence[RequestOutput]) -> int:
    """Tokens of all choices."""
    return sum(len(choice.token_ids) for output in outputs for choice in output.outputs)


def total(outputs: Sequence[RequestOutput]) -> SpeculationMetrics:
    """Speculation's counters over all prompts of a request."""
    return sum((output.metrics for output in outputs), SpeculationMetrics())
