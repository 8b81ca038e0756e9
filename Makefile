# make train: set up .venv and train a network; make test: run the short tests; make matrix: run the long tests (every
# option with every other option, real launchers); make npu: test on a simulated accelerator. No target requires root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test matrix npu lint types format clean

train: $(VENV)/.installed
	$(BIN)/slipstream train street_scenes_pp_lite_t

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadscope -rs -m "not (matrix or slow or npu)"

matrix: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadscope -rs -m "(matrix or slow) and not npu"

npu: $(VENV)/.installed-dev
	npu=$$($(BIN)/python tests/npu/simulated/build.py) && \
	PYTHONPATH=$$npu $(BIN)/python -m pytest -n 2 --dist loadscope -rs tests/npu

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
