"""From a method's name to a drafter: plug-ins, and what is said of those that do not work."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline import drafters, verify
from paceline.config import EngineConfig, SpeculationConfig
from paceline.draft.hybrid import HybridDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.plug_in import PlugInDrafter
from paceline.draft.prediction import PredictionDrafter
from paceline.draft.recycle import RecycleDrafter
from paceline.draft.suffix import SuffixDrafter
from paceline.errors import ConfigError, DraftMismatchError, PacelineError, PlugInError
from paceline.interfaces import Drafter
from paceline.params import SamplingParams
from paceline.testing import CharTokenizer, ToyModel
from paceline.types import RequestView

TARGET: Any = SimpleNamespace(
    name="toy", tokenizer=CharTokenizer(), spec=SimpleNamespace(vocab_size=CharTokenizer().vocab_size, num_layers=2)
)


class Plugged(Drafter):
    name = "plugged"

    def __init__(self, *, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError("no depth,\nno drafts")
        self.depth = depth

    def propose(self, views, budgets):
        return [None for _ in views]


class Nameless(Plugged):
    name = ""


class Unnamed(Drafter):
    def propose(self, views, budgets):
        return [None for _ in views]


class Quitting(Plugged):
    def __init__(self) -> None:
        sys.exit("no\ngood")


class Shy(Plugged):
    @property
    def num_successors(self) -> int:  # type: ignore[override]
        raise RuntimeError("not told")


class Greedy(Plugged):
    num_successors = -1


class Deep(Plugged):
    hidden_layers = (0, "final", 3)


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_ins = ModuleType("plug_ins")
    plug_ins.__dict__.update(
        Plugged=Plugged, Nameless=Nameless, Unnamed=Unnamed, Quitting=Quitting, Shy=Shy, Greedy=Greedy, Deep=Deep,
        Other=dict, function=lambda: Plugged(), number=3,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "plug_ins", plug_ins)


def create(method: str, **options: Any) -> Drafter | None:
    """The drafter inside the one that follows predictions."""
    speculation = SpeculationConfig(method=method, **options)
    drafter = drafters.create(
        EngineConfig(speculation=speculation),
        target=TARGET,
        runner=ToyModel(vocab_size=TARGET.spec.vocab_size),
        verifier=verify.create(speculation.verification, epsilon=0.3, alpha=0.09),
        progress=False,
    )
    assert drafter is None or isinstance(drafter, PredictionDrafter)
    return None if drafter is None else drafter.drafter


def test_built_in_methods() -> None:
    assert create("none") is None
    assert isinstance(hybrid := create("auto"), HybridDrafter)
    assert hybrid.members == ("suffix", "recycle")
    assert isinstance(create("auto", verification="block"), SuffixDrafter)
    assert isinstance(create("ngram", max_ngram=3), NgramDrafter)
    assert isinstance(create("suffix", store_tokens=100), SuffixDrafter)
    assert isinstance(create("recycle", verification="block"), RecycleDrafter)


def test_a_table_is_of_the_targets_tokenizer(tmp_path) -> None:
    table = tmp_path / "table.npz"
    for _ in range(2):  # the second one reads what the first one saved
        drafter = create("ngram+recycle", table=str(table))
        assert drafter is not None
        drafter.close()
        assert np.load(table)["fingerprint"] == TARGET.tokenizer.fingerprint


def test_trees_become_chains_under_rules_that_take_no_trees() -> None:
    text = np.array([5, 6, 7, 5, 6, 8, 5, 6], np.int32)  # 7 or 8 may follow
    view = RequestView("r", text, 2, SamplingParams(), seed=0, stream=0, attempt=0)
    for rule, is_chain in (("coupled", False), ("rejection", True)):
        drafter = create("suffix", verification=rule)
        assert drafter is not None
        [draft] = drafter.propose([view], [8])
        assert draft is not None
        assert draft.is_chain is is_chain


def test_methods_joined_by_plus_are_a_hybrid() -> None:
    drafter = create("ngram + suffix+plug_ins:Plugged", store_tokens=100, options={"depth": 3})
    assert isinstance(drafter, HybridDrafter)
    assert drafter.name == "ngram+suffix+plugged"


def test_a_plug_in_gets_its_options() -> None:
    for options, depth in ((None, 2), ({"depth": 7}, 7)):
        drafter = create("plug_ins:Plugged", options=options)
        assert isinstance(drafter, PlugInDrafter)
        assert isinstance(drafter.drafter, Plugged)
        assert drafter.drafter.depth == depth


def test_a_plug_in_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint("oracle", "plug_ins:Plugged", "paceline.drafters"), EntryPoint("lost", "no_such:A", "x")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: entries)
    drafter = create("oracle", options={"depth": 3})
    assert drafter is not None
    assert drafter.name == "plugged"
    with pytest.raises(ConfigError, match=r"'lost': the plug-in cannot be imported \(ModuleNotFoundError"):
        create("lost")


@pytest.mark.parametrize(
    ("method", "options", "error", "message"),
    [
        ("no_such:Plugged", None, ConfigError, r"cannot be imported \(ModuleNotFoundError: .*PYTHONPATH"),
        ("plug_ins:Lost", None, ConfigError, r"cannot be imported \(AttributeError: .*'Lost'"),
        ("plug_ins:Plugged", {"width": 3}, ConfigError, r"with options \{'width': 3\} \(TypeError: .*'width'"),
        ("plug_ins:Plugged", {"depth": 0}, ConfigError, r"\(ValueError: no depth, no drafts\)"),
        ("plug_ins:Quitting", None, ConfigError, r"with options \{\} \(SystemExit: no good\)"),
        ("plug_ins:Shy", None, PlugInError, r"'plug_ins:Shy' failed in what it declares \(RuntimeError: not told\)"),
        ("plug_ins:Other", None, DraftMismatchError, "is no drafter: it must be a class that derives from"),
        ("plug_ins:function", None, DraftMismatchError, "is no drafter"),
        ("plug_ins:number", None, DraftMismatchError, "is no drafter"),
        ("plug_ins:Nameless", None, DraftMismatchError, "a drafter needs a name; got ''"),
        ("plug_ins:Unnamed", None, DraftMismatchError, "a drafter needs a name; got ''"),
        ("plug_ins:Greedy", None, DraftMismatchError, "num_successors must be an integer >= 0; got -1"),
        ("plug_ins:Deep", None, DraftMismatchError, 'hidden_layers must be a tuple of 0 to 2 or "final"; got '),
    ],
)
def test_plug_ins_that_do_not_work(method: str, options: Any, error: type[PacelineError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        create(method, options=options)
    assert "\n" not in str(caught.value)


def test_a_module_that_fails_when_it_is_imported(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_plug_in.py").write_text("import json\njson.loads('{')\n")
    (tmp_path / "leaving_plug_in.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for method, reason in (("broken_plug_in:A", "JSONDecodeError"), ("leaving_plug_in:A", r"SystemExit: 3\)")):
        with pytest.raises(ConfigError, match=rf"'{method}': the plug-in cannot be imported \({reason}"):
            create(method)
