#!/usr/bin/env bash
# Builds paceline._native for this clone and puts it into src/paceline. make setup runs it; run it again after a change.
#   native/build.sh [OUTPUT] [CMAKE OPTION...]    OUTPUT: folder of the extension, src/paceline if none is named
#   PYTHON=...                                    the interpreter to build for, .venv's if unset; needs nanobind
set -euo pipefail
cd "$(dirname "$0")/.."

output="${1:-src/paceline}"
python="${PYTHON:-.venv/bin/python}"
build="build/native"
[ "$output" = src/paceline ] || build="$output/cmake"

if ! command -v cmake >/dev/null || ! command -v "${CXX:-c++}" >/dev/null; then
  echo "no CMake or no C++ compiler: the native engine is not built, the torch engine will be used"
  exit 0
fi
generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi

cmake -S native -B "$build" "${generator[@]}" -DPython_EXECUTABLE="$(command -v "$python")" \
  --log-level=WARNING "${@:2}" >/dev/null
cmake --build "$build"
# Moved into place: a process that has the old file open keeps it.
for extension in "$build"/_native*.so; do
  cp "$extension" "$output/.new" && mv "$output/.new" "$output/$(basename "$extension")"
done
touch "$build/installed"
