"""native/build.sh where something that it needs is missing: one line that says what, and how to get it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "native" / "build.sh"
BASH, DIRNAME = shutil.which("bash"), shutil.which("dirname")


@pytest.mark.skipif(BASH is None or DIRNAME is None, reason="it is a script for bash")
@pytest.mark.parametrize(("present", "missing"), [((), "cmake"), (("cmake",), "c++")])
def test_what_is_missing_is_one_line(tmp_path: Path, present: tuple[str, ...], missing: str) -> None:
    assert BASH is not None
    assert DIRNAME is not None
    (tmp_path / "dirname").symlink_to(DIRNAME)
    for tool in present:
        (tmp_path / tool).touch(mode=0o755)
    environment = {"PATH": str(tmp_path), "PYTHON": sys.executable}
    result = subprocess.run([BASH, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith(f"warning: no {missing} here, so the native engine is not built and torch runs instead")
    assert "apt install cmake g++" in line
