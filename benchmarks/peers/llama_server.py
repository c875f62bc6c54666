"""llama.cpp's own server, compiled for this machine from the sources that llama-cpp-python carries."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from llama_cpp_python import VERSION

from paceline.models.catalog import cache_folder

BUILD = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF"),
    *("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"),
)


def prepare() -> Path:
    """The program, which is compiled when it is first needed: minutes, with CMake and a C++ compiler."""
    folder = cache_folder() / "peers" / "llama_server" / VERSION
    program = folder / "build" / "bin" / "llama-server"
    if program.is_file():
        return program
    print(f"Compiling llama.cpp's server in {folder}; this can take many minutes.", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    _run([*download, "--dest", str(folder), f"llama-cpp-python=={VERSION}"])
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    [source] = folder.glob("*/vendor/llama.cpp")
    build = folder / "build"
    _run(["cmake", "-S", str(source), "-B", str(build), *BUILD])
    _run(["cmake", "--build", str(build), "--target", "llama-server", "--parallel"])
    return program


def _run(command: list[str]) -> None:
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        raise SystemExit(f"error: {' '.join(command[:4])} ... failed: its message is above.")
