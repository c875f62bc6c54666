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

if ! command -v cmake >/dev/null || ! command -v "${CXX:-c++}" >/dev/null; then
  echo "no CMake or no C++ compiler: the native engine is not built, the torch engine will be used"
  exit 0
fi
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
