"""benchmarks/compare.py and readme_table.py: medians, each repeat's rates, what the table makes of them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

PEER = "peer 1.0 plain, bfloat16"
LOOKUP = "peer 1.0 prompt lookup, bfloat16"


@pytest.fixture
def compare(script: ModuleType) -> ModuleType:
    return script


def report(name: str, rate: float, *, outputs: list[list[int]]) -> dict[str, Any]:
    rates = {"tokens_per_second": rate, "decode_tokens_per_second": 2 * rate, "prefill_tokens_per_second": 10 * rate}
    return {"system": name, "requests": 2, **rates, "by_category": {"code": {"tokens_per_second": rate}}} | {
        "outputs": outputs
    }


@pytest.fixture
def reports() -> dict[str, list[dict[str, Any]]]:
    """The second repeat met a machine of half the speed; the last was undisturbed."""
    plain, lookup = [[1, 2], [3]], [[1, 2], [4]]
    return {
        PEER: [report(PEER, rate, outputs=plain) for rate in (10.0, 5.0, 20.0)],
        LOOKUP: [report(LOOKUP, rate, outputs=lookup) for rate in (20.0, 10.0, 30.0)],
    }


def test_medians_and_every_repeat(compare, reports):
    results = compare.summarize(reports)
    assert results["systems"][PEER]["tokens_per_second"] == 10.0
    assert results["systems"][PEER]["by_category"]["code"]["tokens_per_second"] == 10.0
    assert results["repeats"][PEER]["prefill_tokens_per_second"] == [100.0, 50.0, 200.0]


def test_ids_are_compared_with_the_own_plain_mode(compare, reports):
    systems = compare.summarize(reports)["systems"]
    assert systems[LOOKUP]["identical"] == 1
    assert "identical" not in systems[PEER]
    del reports[PEER]
    assert "identical" not in compare.summarize(reports)["systems"][LOOKUP]


def test_table_has_spread_and_ratios_within_repeats(compare, reports):
    results = compare.summarize(reports) | {
        "model": "toy",
        "settings": {"temperature": 0, "max_tokens": 96, "per_category": 2, "repeats": 3},
        "environment": {"cpu": "CPU", "cores": 2, "memory_bytes": 2**30},
    }
    *_, plain, lookup = compare.render(results).splitlines()
    assert plain == f"| {PEER} | 10.0 (5.0-20.0) | 1.00x | 1.00x | - | 20.0 | 100 | 10 |"
    assert (
        lookup == f"| {LOOKUP} | 20.0 (10.0-30.0) | 2.00x (1.50-2.00) | 2.00x (1.50-2.00) | 1 of 2 | 40.0 | 200 | 20 |"
    )


def test_every_contestant_has_its_script(compare):
    for contestant in compare.CONTESTANTS.values():
        assert (compare.HERE / "peers" / f"{contestant.script}.py").is_file()
