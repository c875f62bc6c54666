"""PlugInDrafter: passes on what it is told and asked; what the plug-in raises is one error that names it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.draft.plug_in import PlugInDrafter
from paceline.errors import PlugInError
from paceline.interfaces import Drafter
from paceline.params import SamplingParams
from paceline.types import Observation
from toy_engine import PROMPT, make_engine, run

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


class Failing(Drafter):
    """Raises the error in one of its methods, and notes the calls of all."""

    name = "failing"
    num_successors = 2
    hidden_layers = ()
    note = "of no use"
    members = ("failing", "other")

    def __init__(self, method: str = "", error: BaseException | None = None) -> None:
        self.calls: list[str] = []
        self._method = method
        self._error = error

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if method == self._method and self._error is not None:
            raise self._error

    def propose(self, views, budgets):
        self._called("propose")
        return [None for _ in views]

    def observe(self, step: Observation) -> None:
        last = step.successors[-1]
        assert last is None or last.shape[1] == 2
        self._called("observe")

    def release(self, request_id: str) -> None:
        self._called("release")

    def close(self) -> None:
        self._called("close")


def plugged(method: str = "", error: BaseException | None = None) -> PlugInDrafter:
    return PlugInDrafter(Failing(method, error), method="a:B")


def test_everything_is_passed_on() -> None:
    drafter = plugged()
    assert (drafter.name, drafter.num_successors, drafter.note) == ("failing", 2, "of no use")
    assert drafter.members == ("failing", "other")
    run(make_engine(drafter=drafter), [PROMPT], PARAMS)
    drafter.close()
    assert isinstance(drafter.drafter, Failing)
    assert set(drafter.drafter.calls) == {"propose", "observe", "release", "close"}


@pytest.mark.parametrize("error", [ValueError("three\nlines\nlong"), SystemExit(4), RecursionError()], ids=repr)
@pytest.mark.parametrize("method", ["propose", "observe", "release"])
def test_what_it_raises_names_it(method: str, error: BaseException) -> None:
    engine = make_engine(drafter=plugged(method, error))
    with pytest.raises(PlugInError, match=rf"^plug-in 'a:B' failed in {method} \({type(error).__name__}") as caught:
        run(engine, [PROMPT], PARAMS)
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)
    engine.check_integrity()


def test_closing_may_fail_too() -> None:
    with pytest.raises(PlugInError, match="failed in close"):
        plugged("close", OSError("disk")).close()


def test_an_interrupt_is_none_of_its_failures() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(make_engine(drafter=plugged("propose", KeyboardInterrupt())), [PROMPT], PARAMS)


@pytest.mark.parametrize("place", ["import", "__init__", "propose", "observe"])
@pytest.mark.parametrize("raising", ["raise LookupError('lost\\nagain')", "import sys; sys.exit(7)"])
def test_a_command_ends_with_one_line(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, raising: str
) -> None:
    def body(method: str, otherwise: str = "pass") -> str:
        return raising if method == place else otherwise

    (tmp_path / "failing_plug_in.py").write_text(f"""
from paceline.interfaces import Drafter
{body("import")}
class A(Drafter):
    name = "a"
    def __init__(self):
        {body("__init__")}
    def propose(self, views, budgets):
        {body("propose", "return [None for _ in views]")}
    def observe(self, step):
        {body("observe")}
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "failing_plug_in", raising=False)
    options = ("--max-tokens", "8", "--kv-cache-memory", "4M", "--threads", "1", "--speculation", "failing_plug_in:A")
    result = CliRunner().invoke(app, ["generate", str(tiny_llama), "--prompt", "hello", *options])
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if "KV cache" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert "'failing_plug_in:A'" in lines[0]
    assert ("LookupError: lost again" if "lost" in raising else "SystemExit: 7") in lines[0]
