"""Other engines on a user's own prompts, by the scripts of the repository: what `paceline bench --compare` runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import paceline
from paceline.errors import ConfigError

_SCRIPTS = Path(paceline.__file__).parents[2] / "benchmarks"
_OWN = "native"  # names of Paceline's own rows begin with it


def compare(
    model: str,
    names: Sequence[str],
    *,
    speculation: str,
    prompts: str,
    per_category: int | None,
    max_tokens: int,
    repeats: int,
) -> tuple[dict[str, Any], str]:
    """Paceline, plain and by `speculation`, beside the named peers in turn: the results and their table in Markdown.

    Raises ConfigError for a name that no peer has, and where the scripts are not there.
    """
    if not (_SCRIPTS / "compare.py").is_file():
        raise ConfigError("--compare runs scripts that only the repository has: clone it, and run `make setup` there.")
    script = _script()
    known = [name for name in script.CONTESTANTS if not name.startswith(_OWN)]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--compare knows no {unknown[0]!r:.60}: it takes {', '.join(known)}.")
    own = [script.CONTESTANTS[_OWN], script.Contestant("paceline_generate", ("--speculation", speculation))]
    try:
        results = script.compare(
            model,
            [*own, *(script.CONTESTANTS[name] for name in dict.fromkeys(names))],
            speculation=speculation,
            prompts=prompts,
            per_category=per_category,
            max_tokens=max_tokens,
            repeats=repeats,
        )
    except subprocess.CalledProcessError as error:  # which has said why
        raise ConfigError(f"--compare: {Path(error.cmd[1]).stem} ended with {error.returncode}: see above.") from error
    return results, script.render(results)


def _script() -> ModuleType:
    """The repository's compare.py, whose own imports are found beside it."""
    sys.path.insert(0, str(_SCRIPTS))
    try:
        return import_module("compare")
    finally:
        sys.path.remove(str(_SCRIPTS))
