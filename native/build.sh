#!/usr/bin/env bash
# Builds paceline._native for this clone; make setup runs it once, run it again after a change.
#   native/build.sh [CMAKE OPTION...]
# PYTHON is the interpreter to build for (.venv's; needs nanobind), BUILD where CMake works, OUTPUT where the extension
# goes; PACELINE_WERROR=ON turns warnings into errors.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-.venv/bin/python}"
build="${BUILD:-build/native}"
output="${OUTPUT:-src/paceline}"

for tool in cmake "${CXX:-c++}"; do
  if ! command -v "$tool" >/dev/null; then
    echo "warning: no $tool here, so the native engine is not built and torch runs instead, slower on a CPU: install" \
      "CMake and a C++20 compiler (on Debian: apt install cmake g++), then run native/build.sh." >&2
    exit 0
  fi
done
generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi

cmake -S native -B "$build" "${generator[@]}" --log-level=WARNING \
  -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" -DPACELINE_WERROR="${PACELINE_WERROR:-OFF}" "$@"
cmake --build "$build" --parallel "$(getconf _NPROCESSORS_ONLN)"
# Moved into place: a process that has the old file open keeps it.
for extension in "$build"/_native*.so; do
  cp "$extension" "$output/.new"
  mv "$output/.new" "$output/$(basename "$extension")"
done
touch "$build/installed"
