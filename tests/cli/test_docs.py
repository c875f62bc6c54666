"""docs/cli.md and docs/glossary.md say what the command line says."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

from paceline.bench.cost_curve import Cost, Curve, DraftCost
from paceline.bench.equality import Divergence, Equality
from paceline.bench.report import summarize
from paceline.bench.runner import Measurement, Sample
from paceline.bench.workload import Prompt
from paceline.cli.output import output_json
from paceline.cli.profile import curve_json
from paceline.cli.verify import equality_json
from paceline.engine.trace import TraceHeader, TraceNode, TraceRequest, TraceSample, TraceStep, TraceToken
from paceline.models.tuned_layers import TunedLayers
from paceline.testing import ToyModel
from paceline.types import Completion, RequestOutput, SpeculationMetrics

TRACED = {
    field.name: 0
    for line in (TraceHeader, TraceRequest, TraceStep, TraceNode, TraceSample, TraceToken)
    for field in dataclasses.fields(line)
}
DOCS = Path(__file__).parents[2] / "docs"
OUTPUT = RequestOutput(
    request_id="r",
    prompt=None,
    prompt_token_ids=(1,),
    outputs=(Completion(index=0, text="ab", token_ids=(5, 6), finish_reason="length"),),
    seed=0,
    finished=True,
    lossless=True,
    reproducible=True,
    metrics=SpeculationMetrics(),
)
PROMPT = Prompt("p", "chat", ("x",))


def names(value) -> set[str]:
    """All keys of a JSON value, the categories' names left out."""
    if isinstance(value, list):
        return set().union(*map(names, value))
    if not isinstance(value, dict):
        return set()
    if "chat" in value:
        return names(value["chat"])
    return set(value).union(*map(names, value.values()))


GENERATED = output_json(OUTPUT)
MEASURED = summarize(
    Measurement(
        (Sample(PROMPT, "plain", OUTPUT, 1.0), Sample(PROMPT, "speculative", OUTPUT, 1.0)),
        {"plain": (1.0,), "speculative": (1.0,)},
    )
)
PROFILED = curve_json(
    Curve((Cost(1, 2.0, 1.0, 3.0),), (DraftCost(1, 2.0, 1.0, 3.0, 4),)),
    runner=ToyModel(),
    bandwidth=1.0,
    drafter="ngram",
)
VERIFIED = equality_json(Equality(1, 2, (Divergence("p", 0, 1, 2, 0.5, False),), True))

TUNED = dataclasses.asdict(TunedLayers("m", (0, 2), 2, 0.5, 1.1, 100))


def test_cli_page_is_current():
    spec = importlib.util.spec_from_file_location("docs_cli", DOCS / "cli.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == module.render(), "run `make docs`"


@pytest.mark.parametrize(
    "value",
    [GENERATED, MEASURED, VERIFIED, PROFILED, TRACED, TUNED],
    ids=["generate", "bench", "verify", "profile", "trace", "tune"],
)
def test_json_names_are_in_the_glossary(value):
    glossary = set(re.findall(r"`([\w.:]+)`", (DOCS / "glossary.md").read_text(encoding="utf-8")))
    words = {part for name in glossary for part in name.split(".")}
    assert names(value) - words == set()


def test_origins_and_metrics_are_glossary_words():
    glossary = (DOCS / "glossary.md").read_text(encoding="utf-8")
    for word in ("accepted", "recovered", "bonus", "plain"):
        assert f"| {word} |" in glossary
    counters = [field.name for field in dataclasses.fields(SpeculationMetrics) if field.name != "num_steps"]
    for name in counters:
        assert f"paceline:spec_decode_{name}_total" in glossary
