# make train: set up .venv and train a network; make test: run the short tests; make matrix: run the long tests (every
# option with every other option, real launchers). No target requires root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test matrix lint types format clean

train: $(VENV)/.installed
	$(BIN)/slipstream train street_scenes_pp_lite_t

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadscope -rs -m "not (matrix or slow)"

matrix: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadscope -rs -m "matrix or slow"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Slipstream requires Python 3.11 or newer; run make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[images,recipes]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis
