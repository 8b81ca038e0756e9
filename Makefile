# make train: set up .venv and train a network; make test: run the short tests; make matrix: run the long tests (every
# option with every other option, real launchers); make exhaustive: run these tests with more parameter values, which
# takes longer than make test and make matrix together and is not part of .ci/run; make npu: test on a simulated
# accelerator; make gpu: test and measure on the accelerator of this machine;
# make openmmlab: install OpenMMLab's libraries in .venv-openmmlab, which compiles mmcv and takes up to an hour, and
# train with them; make versions: run the short tests with several versions of Python and torch, which takes hours; make
# docs: build the site in site/. No target requires root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Three workers suit two cores, because many tests wait for other processes.
PYTEST = $(BIN)/python -m pytest -n 3 --dist loadscope -rs

# Train real models of seven libraries, with random weights, against plain loops. The libraries are installed without
# their dependencies, because those include CUDA builds.
zoo: .venv-zoo/.installed
	OMP_NUM_THREADS=1 .venv-zoo/bin/python benchmarks/zoo.py $(ARGS)

.venv-zoo/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-zoo
	.venv-zoo/bin/python -m pip install --quiet -c constraints.txt -e . huggingface_hub tokenizers safetensors regex \
		requests tqdm pillow einops psutil xxhash aiohttp scipy pyparsing typer importlib_metadata
	.venv-zoo/bin/python -m pip install --quiet --no-deps timm==1.0.31 transformers==5.24.0 diffusers==0.42.1 \
		segmentation_models_pytorch==0.6.0 monai==1.6.1 torch_geometric==2.8.1 torchvision==0.28.0
	touch $@

.PHONY: train test matrix exhaustive npu openmmlab faults gpu wheels versions docs lint types format clean

train: $(VENV)/.installed
	$(BIN)/slipstream train street_scenes_pp_lite_t $(ARGS)

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not (matrix or slow or npu or exhaustive)"

matrix: $(VENV)/.installed-dev
	$(PYTEST) -m "(matrix or slow) and not (npu or exhaustive)"

# COUNT sets the number of random training programs (tests/generated), and SEED selects them.
exhaustive: $(VENV)/.installed-dev
	$(PYTEST) -m exhaustive
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m generated $(COUNT) $(SEED)

npu: $(VENV)/.installed-dev
	npu=$$($(BIN)/python tests/npu/simulated/build.py) && \
	export PYTHONPATH=$$npu && $(PYTEST) tests/npu && \
	out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && PYTHON=$(BIN)/python TINY=1 OUT=$$out .ci/gpu

# The libraries are installed without their dependencies, because those include CUDA builds and older versions of some
# packages. tests/openmmlab/shims replaces torchvision and imgaug, because no test calls their functions.
openmmlab: .venv-openmmlab/.installed
	.venv-openmmlab/bin/python -m pytest -rs tests/openmmlab

.venv-openmmlab/.installed: $(VENV)/.installed-dev pyproject.toml
	$(PYTHON) -m venv .venv-openmmlab
	.venv-openmmlab/bin/python -m pip install --quiet -c constraints.txt -e '.[dev,openmmlab]' ninja setuptools wheel psutil
	.venv-openmmlab/bin/python -m pip install --quiet einops ftfy mat4py model-index prettytable regex \
		pycocotools scipy shapely six terminaltables termcolor tqdm
	MMCV_WITH_OPS=1 .venv-openmmlab/bin/python -m pip install --quiet --no-deps --no-build-isolation onedl-mmcv==2.3.6
	.venv-openmmlab/bin/python -m pip install --quiet --no-deps onedl-mmpretrain==1.3.6 \
		onedl-mmsegmentation==1.4.2 onedl-mmdetection==3.5.1
	touch $@

# Try thousands of random faults and invalid inputs, which takes hours. COUNT sets their number, and SEED selects them.
COUNT ?= 2000
SEED ?= 0
faults: $(VENV)/.installed-dev
	export PYTHONPATH=tests && \
	$(BIN)/python tests/faults/interruptions.py --count $(COUNT) --seed $(SEED) && \
	$(BIN)/python tests/faults/fuzz_config.py --count $$((50 * $(COUNT))) --seed $(SEED) --jobs 2 && \
	$(BIN)/python tests/faults/fuzz_files.py --count $$((50 * $(COUNT))) --seed $(SEED) --jobs 2

# Run the GPU tests and benchmarks with the packages of $(PYTHON), without internet access and in under nine minutes.
gpu:
	PYTHON=$(PYTHON) .ci/gpu

# Download the packages that make gpu requires on a machine without internet access, except torch, numpy, pyyaml, rich,
# pytest and hypothesis.
wheels:
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir wheels \
		antlr4-python3-runtime==4.9.3 hydra-core 'omegaconf<2.4' pytorch-optimizer tomli-w torchao

versions: $(BIN)/python
	$(BIN)/python .ci/versions.py $(PAIRS)

# A warning, such as a missing link or anchor, is an error.
docs: $(VENV)/.installed-dev
	$(BIN)/mkdocs build --strict

# --no-cache: with its cache, ruff does not check a file again when a new folder changes one of its imports to first-party.
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check --no-cache .
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
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[images]'
	touch $@

# timm is installed without its dependencies, because those include a CUDA build of torchvision, which the tests do not
# need (see tests/torchvision_operators.py).
$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps timm==1.0.31
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis
