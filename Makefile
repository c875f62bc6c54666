# Everything runs from .venv, which `setup` creates and renews when pyproject.toml or constraints.txt changed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
NATIVE := build/native/installed

# Threads that wait sleep instead of spinning: on a busy machine spinning ones keep those that work from the cores.
test test-all: export OMP_WAIT_POLICY ?= passive

.PHONY: setup demo test test-all lint sanitize package bench docs

setup: $(STAMP) $(NATIVE)

# Old pips take the packages that build Paceline from the first, new ones from the second.
$(STAMP): export PIP_CONSTRAINT := constraints.txt
$(STAMP): export PIP_BUILD_CONSTRAINT := constraints.txt
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: Paceline needs Python 3.11 or newer; try make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -e '.[torch,dev]'
	touch $@

$(NATIVE): $(STAMP) $(wildcard native/*) src/paceline/__init__.py  # which has the version
	PYTHON=$(BIN)/python native/build.sh

demo: setup
	$(BIN)/paceline demo

test: setup
	$(BIN)/python -m pytest

test-all: setup
	$(BIN)/python -m pytest -m ''

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The native engine's tests under AddressSanitizer and UBSan, in a copy of the package. The C++ library is preloaded too:
# the sanitizer has to find the real throw. Python's own leaks are not ours to find; --capture=sys lets reports through.
sanitize: setup
	rm -rf build/sanitize/paceline
	mkdir -p build/sanitize
	cp -r src/paceline build/sanitize
	rm -f build/sanitize/paceline/_native*.so
	PYTHON=$(BIN)/python BUILD=build/sanitize/cmake OUTPUT=build/sanitize/paceline \
	  native/build.sh -DPACELINE_SANITIZE=address,undefined
	PYTHONPATH=build/sanitize $(BIN)/python -c \
	  'from importlib.util import find_spec as find; assert "/build/sanitize/" in find("paceline._native").origin'
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	  PYTHONPATH=build/sanitize $(BIN)/python -m pytest --capture=sys tests/native

package: setup
	PYTHON=$(BIN)/python .ci/package

bench: setup
	$(BIN)/python benchmarks/compare.py
	$(BIN)/python benchmarks/auto.py
	$(BIN)/python benchmarks/reliability.py
	$(BIN)/python benchmarks/drafters.py
	$(BIN)/python benchmarks/overhead.py --save
	$(BIN)/python benchmarks/memory.py --save
	$(BIN)/python benchmarks/quality.py --save
	$(BIN)/python benchmarks/performance_page.py

docs: setup
	$(BIN)/python docs/cli.py
