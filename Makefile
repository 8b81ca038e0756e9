# make train: set up .venv and train a network; make test: run the short tests; make matrix: run the long tests (every
# option with every other option, real launchers); make npu: test on a simulated accelerator; make gpu: test and measure
# on the accelerator of this machine; make versions: run the short tests with several versions of Python and torch,
# which takes hours. No target requires root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test matrix npu gpu wheels versions lint types format clean

train: $(VENV)/.installed
	$(BIN)/slipstream train street_scenes_pp_lite_t

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadscope -rs -m "not (matrix or slow or npu)"

matrix: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadscope -rs -m "(matrix or slow) and not npu"

npu: $(VENV)/.installed-dev
	npu=$$($(BIN)/python tests/npu/simulated/build.py) && \
	export PYTHONPATH=$$npu && $(BIN)/python -m pytest -n 2 --dist loadscope -rs tests/npu && \
	out=$$(mktemp -d) && PYTHON=$(BIN)/python TINY=1 OUT=$$out .ci/gpu

# Run the GPU tests and benchmarks with the packages of $(PYTHON), without internet and in under nine minutes.
gpu:
	PYTHON=$(PYTHON) .ci/gpu

# Download the packages that a machine without internet needs for make gpu, besides torch, numpy, pyyaml, rich, pytest
# and hypothesis.
wheels:
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir wheels \
		antlr4-python3-runtime==4.9.3 hydra-core 'omegaconf<2.4' pytorch-optimizer tomli-w

versions: $(BIN)/python
	$(BIN)/python .ci/versions.py $(PAIRS)

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
