"""Speculation's counters under the names that metrics systems read (vLLM's, with our prefix)."""

from __future__ import annotations

import json

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
