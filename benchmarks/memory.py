"""Memory and start-up of `paceline generate`: peak resident bytes beside weights and K/V, seconds to the first token.

usage: memory.py [MODEL] [--engine E] [--max-tokens N] [--repeats N] [--save]
Each run is a process of its own, as from a shell; figures are medians over the repeats. `cold` is a start with the
model's files out of the system's page cache, `warm` one with them in it. --save writes results/memory-MODEL.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from results_file import keep, name_of

# Nothing of Paceline is imported up here: the peak of a child counts what this process held when it was forked.

HERE = Path(__file__).parent
PROMPT = "Write a letter to a friend about your last holiday, with all that you saw and ate on the way."


class Run(NamedTuple):
    """What became of one command."""

    output: str
    first_byte_seconds: float  # from the start of the process to the first byte on stdout
    peak_bytes: int  # resident


def run(*arguments: str) -> Run:
    """`paceline` with these arguments; SystemExit, after its own message, where it fails."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "paceline", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        output, notes = first + process.stdout.read(), process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.stderr.buffer.write(notes)
        raise SystemExit(f"error: paceline {' '.join(arguments)} ended with code {process.returncode}.")
    return Run(output.decode(), seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def generate(model: str, engine: str, max_tokens: int, *options: str) -> Run:
    limits = ("--max-tokens", str(max_tokens), "--ignore-eos")
    return run("generate", model, "--prompt", PROMPT, "--engine", engine, *limits, *options)


def peak(model: str, engine: str, *, max_tokens: int, repeats: int) -> dict[str, int]:
    """Bytes of a run that generates max_tokens, beside those of the weights that a pass reads and of the K/V used."""
    runs = [generate(model, engine, max_tokens, "--json") for _ in range(repeats)]
    answer = json.loads(runs[0].output)
    tokens = answer["num_prompt_tokens"] + len(answer["token_ids"])
    once = ("--tokens", "1", "--context", "1", "--repeats", "1", "--speculation", "none")
    sizes = json.loads(run("profile", model, "--engine", engine, *once, "--json").output)
    return {
        "peak_bytes": int(median(own.peak_bytes for own in runs)),
        "weight_bytes": sizes["weight_bytes"],
        "kv_bytes": tokens * sizes["kv_bytes_per_token"],
        "tokens": tokens,
    }


def first_token_seconds(model: str, engine: str, *, files: Sequence[Path], repeats: int) -> dict[str, float]:
    """Medians of the time from the command to the first token."""
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(repeats):
        for path in files:
            forget(path)
        for own in seconds.values():
            own.append(generate(model, engine, 1).first_byte_seconds)
    return {start: median(own) for start, own in seconds.items()}


def forget(path: Path) -> None:
    """Takes a file out of the page cache, as far as no process holds it."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def model_files(model: str) -> list[Path]:
    """The files of a model, which is fetched if it is not there."""
    script = "import sys; from paceline.models.catalog import resolve; print(resolve(sys.argv[1]))"
    path = Path(
        subprocess.run(
            [sys.executable, "-c", script, model], stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()
    )
    return [path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args(arguments)
    files = model_files(given.model)
    results: dict[str, Any] = {
        "model": given.model,
        "engine": given.engine,
        "repeats": given.repeats,
        **peak(given.model, given.engine, max_tokens=given.max_tokens, repeats=given.repeats),
        "file_bytes": sum(path.stat().st_size for path in files),
        "first_token_seconds": first_token_seconds(given.model, given.engine, files=files, repeats=given.repeats),
    }
    from paceline.bench.environment import describe_environment

    results["environment"] = describe_environment()
    if given.save:
        keep(results, f"memory-{name_of(given.model)}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
