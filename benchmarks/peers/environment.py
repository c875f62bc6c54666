"""Runs a peer in an environment of its own, `$PACELINE_HOME/peers/NAME`, which is made when it is first needed.

A peer's script runs twice. Started by the user, in Paceline's environment, it makes the workload and the peer's
environment; then it starts itself there, with `--inside`, to measure.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Install = Sequence[Sequence[str]]  # the arguments of `pip install`, one call after another


def main(
    script: str,
    install: Install,
    report: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    convert: Callable[[Any], Path] | None = None,
    **options: Any,
) -> None:
    """Prints report(workload), computed inside the environment named after the script, as one JSON line.

    convert: from Paceline's LoadedModel to what the peer reads instead of the GGUF file. options: of workload.parser.
    """
    if sys.argv[1:2] == ["--inside"]:
        source, target = map(Path, sys.argv[2:])
        target.write_text(json.dumps(report(json.loads(source.read_text()))))
        return
    import workload  # needs Paceline

    given, model = workload.create(workload.parser(**options).parse_args())
    if convert is not None:
        given["model"] = str(convert(model))
    print(run_inside(script, install, given))


def run_inside(script: str, install: Install, given: dict[str, Any]) -> str:
    """The JSON text that the script writes inside; whatever its libraries print goes to stderr."""
    python = prepare(Path(script).stem, install)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "workload.json"), Path(folder, "report.json")
        source.write_text(json.dumps(given))
        command = [str(python), script, "--inside", str(source), str(target)]
        code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
        if code != 0:
            raise SystemExit(f"error: {Path(script).name} ended with code {code} inside {python.parents[1]}.")
        return target.read_text()


def prepare(name: str, install: Install) -> Path:
    """The interpreter of the environment. It is made anew where what is installed is not what is asked for."""
    from paceline.models.catalog import cache_folder

    folder = cache_folder() / "peers" / name
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    wanted = json.dumps([list(call) for call in install])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"Installing the peer {name} into {folder}; this can take minutes.", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    for call in install:
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *call]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
            raise SystemExit(f"error: pip could not install the peer {name} into {folder}: its message is above.")
    stamp.write_text(wanted)
    return python
