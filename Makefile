.DEFAULT_GOAL := help
.PHONY: help install train eval show test test-all test-gpu lint format types check clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
RECIPE ?= debug
RANKS ?=
ARGS ?=
GPU := $(shell command -v nvidia-smi)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := .venv/bin

help:      ## Show these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: .venv/.installed  ## Make .venv with colo, the engine for this machine, and the development tools

# Without a GPU torch comes first, from PyTorch's own index: PyPI's is the CUDA build, 20 times as large.
# The engine for CPU pulls in torchvision, torchaudio and torchcodec, whose builds break transformers there.
.venv/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
ifeq ($(GPU),)
	$(BIN)/pip install --retries 1 --extra-index-url $(TORCH_INDEX) torch==2.13.0
	$(BIN)/pip install -e '.[cpu,dev]'
	$(BIN)/pip uninstall --yes torchvision torchaudio torchcodec
else
	$(BIN)/pip install -e '.[cuda,dev]'
endif
	touch $@

train: .venv/.installed  ## Train: make train RECIPE=debug RANKS=2 ARGS="num_steps=50 seed=1"
	$(BIN)/colo train $(if $(RANKS),--ranks $(RANKS)) --config-name $(RECIPE) $(ARGS)

eval: .venv/.installed  ## Score held-out prompts: make eval RECIPE=... ARGS="model=FOLDER"
	$(BIN)/colo eval $(if $(RANKS),--ranks $(RANKS)) --config-name $(RECIPE) $(ARGS)

show: .venv/.installed  ## Print every option of RECIPE with its value
	@$(BIN)/colo show --config-name $(RECIPE) $(ARGS)

test: .venv/.installed  ## Test without a GPU, and without the slow tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -v -m "not slow and not gpu" $(ARGS)

test-all: lint types  ## Everything that needs no GPU: lint, types, all tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -v -m "not gpu" $(ARGS)

test-gpu: .venv/.installed  ## Tests that need a GPU; those that need more than there are here are skipped
	$(BIN)/pytest -v -m gpu $(ARGS)

lint: .venv/.installed  ## Judge the code's form, change nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/.installed  ## Put the code in form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/.installed  ## Check types
	$(BIN)/basedpyright

check: lint types test  ## What to run before a push: lint, types, test

clean:     ## Remove .venv and caches; runs/ and models/ stay
	rm -rf .venv .pytest_cache .ruff_cache build *.egg-info
	find colo tests recipes -name __pycache__ -type d -exec rm -rf {} +
