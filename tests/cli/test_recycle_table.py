"""The table of `recycle` on disk: which commands save it, and that a full disk costs no output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app

PROMPTS = Path(__file__).parents[1] / "data" / "prompts.jsonl"
COMMANDS = {
    "generate": ("--prompt", "ab ab ab"),
    "chat": (),
    "verify": ("--prompts", PROMPTS, "--limit", 1),
}


def invoke(command, model, table, *, exit_code=0):
    speculation = json.dumps({"method": "recycle", "table": str(table)})
    short = ("--max-tokens", 24, "--kv-cache-memory", "4M", "--threads", 1, "--speculation", speculation)
    result = CliRunner().invoke(app, list(map(str, (command, model, *COMMANDS[command], *short))), input="ab ab ab\n")
    assert result.exit_code == exit_code, result.output
    return result


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_saves_the_table(tiny_llama, tmp_path, command):
    table = tmp_path / "table.npz"
    first = invoke(command, tiny_llama, table)
    assert [path.name for path in tmp_path.iterdir()] == ["table.npz"]
    if command == "generate":
        assert invoke(command, tiny_llama, table).stdout == first.stdout


def test_what_is_written_already_stays_where_the_table_cannot_be_saved(tiny_llama, tmp_path, monkeypatch):
    expected = invoke("generate", tiny_llama, tmp_path / "table.npz")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    result = invoke("generate", tiny_llama, tmp_path / "other.npz", exit_code=2)
    assert result.stdout == expected.stdout
    [error] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert error.endswith("other.npz cannot be written (No space left on device): make room, or give another path.")
    assert [path.name for path in tmp_path.iterdir()] == ["table.npz"]


def test_a_table_that_is_none_is_said_before_anything_is_computed(tiny_llama, tmp_path):
    (tmp_path / "table.npz").write_text("nothing of the kind")
    result = invoke("generate", tiny_llama, tmp_path / "table.npz", exit_code=2)
    assert result.stdout == ""
    assert "must be a table of successors" in result.stderr
