"""Speculation's counters under the names that metrics systems and responses have for them (vLLM's)."""

from __future__ import annotations

import itertools
import json
from typing import Any

from paceline.types import SpeculationMetrics

_PREFIX = "paceline:spec_decode_num"


def counters(metrics: SpeculationMetrics) -> dict[str, int]:
    """Counter name, labels included -> value. Accepted tokens by position count each draft that reached it."""
    per_position = {
        f'{_PREFIX}_accepted_tokens_per_pos_total{{position="{position}"}}': count
        for position, count in enumerate(metrics.num_accepted_tokens_per_pos)
    }
    per_drafter = {
        f"{_PREFIX}_{what}_tokens_per_drafter_total{{drafter={json.dumps(name)}}}": count
        for what, counts in (
            ("draft", metrics.num_draft_tokens_per_drafter),
            ("accepted", metrics.num_accepted_tokens_per_drafter),
        )
        for name, count in counts.items()
    }
    return {
        f"{_PREFIX}_drafts_total": metrics.num_drafts,
        f"{_PREFIX}_draft_tokens_total": metrics.num_draft_tokens,
        f"{_PREFIX}_accepted_tokens_total": metrics.num_accepted_tokens,
        **per_position,
        **per_drafter,
    }


def summary(metrics: SpeculationMetrics) -> dict[str, Any]:
    """`metrics.speculative_decoding` of a response; acceptance_histogram[k] counts drafts with k tokens accepted."""
    reached = (metrics.num_drafts, *metrics.num_accepted_tokens_per_pos, 0)
    return {
        "mean_acceptance_length": metrics.acceptance_length,
        "draft_acceptance_rate": metrics.acceptance_rate,
        "acceptance_histogram": [here - beyond for here, beyond in itertools.pairwise(reached)],
        "num_steps": metrics.num_steps,
        "num_spec_steps": metrics.num_drafts,
        "num_accepted_draft_tokens": metrics.num_accepted_tokens,
        "num_draft_tokens": metrics.num_draft_tokens,
    }
