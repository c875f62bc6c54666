# Everything runs from .venv, which `setup` creates and renews when pyproject.toml or constraints.txt changed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

# Threads that wait sleep instead of spinning: on a busy machine spinning ones keep those that work from the cores.
test test-all: export OMP_WAIT_POLICY ?= passive

.PHONY: setup demo test test-all lint bench docs

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: Paceline needs Python 3.11 or newer; try make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[torch,dev]'
	touch $@

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

bench: setup
	$(BIN)/python benchmarks/compare.py
	$(BIN)/python benchmarks/readme_table.py
	$(BIN)/python benchmarks/overhead.py --save

docs: setup
	$(BIN)/python docs/cli.py
