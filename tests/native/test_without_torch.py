"""The native engine needs no torch: every command runs where it cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SHORT = ("--max-tokens", "8", "--kv-cache-memory", "4M", "--threads", "1")
PROGRAM = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
import paceline.cli.demo
paceline.cli.demo.MODEL, paceline.cli.demo.MAX_TOKENS = sys.argv[1], 8
from paceline.cli.main import app
app(sys.argv[2:])
"""


def run(model: Path, *command: str, **options) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", PROGRAM, str(model), *command]
    result = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stderr
    return result


def test_generate(tiny_llama: Path) -> None:
    result = run(tiny_llama, "generate", str(tiny_llama), "--prompt", "ab ab ab", *SHORT, "--json")
    assert len(json.loads(result.stdout)["token_ids"]) > 0
    assert "float32 safetensors, native engine (" in result.stderr
    assert "KV cache int16 up to" in result.stderr


def test_chat(tiny_llama: Path) -> None:
    assert "tokens/s" in run(tiny_llama, "chat", str(tiny_llama), *SHORT, input="hello\n").stderr


def test_verify_and_bench(tiny_llama: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": 1, "category": "chat", "turns": ["ab ab ab"]}\n')
    common = (str(tiny_llama), "--prompts", str(prompts), *SHORT, "--speculation", "ngram", "--json")
    assert json.loads(run(tiny_llama, "verify", *common).stdout)["identical"] == 1
    report = json.loads(run(tiny_llama, "bench", *common, "--quantization", "int8", "--kv-cache-dtype", "int8").stdout)
    settings = report["settings"]
    assert (settings["engine"], settings["quantization"], settings["kv_cache_dtype"]) == ("native", "int8", "int8")
    assert "int8 from float32 safetensors, native engine" in report["model"]


def test_demo_and_models(tiny_llama: Path) -> None:
    assert "The 5 texts are the same, token for token." in run(tiny_llama, "demo").stdout
    assert "smollm2-135m" in run(tiny_llama, "models").stdout


def test_profile(tiny_llama: Path) -> None:
    common = ("--tokens", "1,3", "--context", "8", "--repeats", "1", *SHORT[2:], "--json")
    report = json.loads(run(tiny_llama, "profile", str(tiny_llama), *common, "--quantization", "int4").stdout)
    assert [cost["tokens"] for cost in report["target"]] == [1, 3]
    assert report["settings"]["engine"] == "native"
    assert "int4 from float32 safetensors, native engine" in report["model"]
