"""What `paceline verify --proof` found, as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.bench.environment import describe_environment
from paceline.bench.page import heading, page, paragraph, table
from paceline.bench.proof import Check
from paceline.models import runners

if TYPE_CHECKING:
    from paceline.llm import LLM

VERDICTS = {True: "holds", False: "FAILS", None: "untested"}
_READING = (
    "The ids of speculative and plain decoding agree if the rule is `coupled`, or nothing is sampled: both draw the "
    "target's token at each place with the same random numbers.",
    "Each output, fed to the target in a single pass, must be what the target chooses at each place. This looks at no "
    "second run, so that two runs which are wrong in the same way are found out.",
    "A target that drafts for itself must accept what it drafted. Where it does not, rounding differs between passes, "
    "or positions, masks or the cache are wrong; no drafter has a part in it.",
    "Rules that keep the law of a text but not its ids are asked whether many short texts, written either way, could "
    "come from one law.",
    "On the torch engine rounding depends on the shape of a pass. Where the two best candidates are closer than 0.001 "
    "in log, either may win: a tie, which is reported and counts as agreement. The native engine is equal to the bit.",
)


def render(checks: Sequence[Check], *, llm: LLM, prompts: str) -> str:
    """HTML of the checks of an LLM; prompts: which were used, and how."""
    environment = describe_environment()
    conditions = {
        "model": llm.model_card,
        "rule": f"{llm.config.speculation.verification}, {'lossless' if llm.lossless else 'lossy'}",
        "speculation": json.dumps(runners.settings(llm.config)["speculation"]),
        "prompts": prompts,
        "machine": f"{environment['cpu']}, {environment['cores']} cores",
        "versions": ", ".join(f"{name} {own}" for name, own in environment["versions"].items()),
    }
    rows = [(check.name, VERDICTS[check.holds], check.found) for check in checks]
    found = {check.holds for check in checks}
    verdict = "All checks hold."
    if False in found:
        verdict = "At least one check fails."
    elif None in found:
        verdict = "Nothing was drafted for some checks, which are untested: other prompts may tell more."
    return page(
        [
            paragraph(verdict),
            table(("check", "", "found"), rows, kind="text"),
            heading("What was run"),
            table(("", ""), conditions.items(), kind="text"),
            heading("How to read it"),
            *(paragraph(text) for text in _READING),
        ],
        title="paceline verify",
        heading="Is the text the target's own?",
    )
