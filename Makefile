PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help run test test-browser test-gpu lint format fuzz bench bench-model bench-gpu clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

# torch goes first, so that nothing after it can choose another build.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

run: $(READY)  ## Set up, train on the shipped digits without and with FastRPB, and compare
	$(BIN)/fastrpb demo

test: $(READY)  ## Set up and run the whole suite, on as many cores as there are
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8

test-browser: $(READY)  ## Look at the report in headless Chromium (Debian's package chromium)
	$(BIN)/pytest -m browser

test-gpu: $(READY)  ## Run the tests of the kernels on this machine's GPU
	$(BIN)/pytest tests/test_kernels.py tests/test_operators.py tests/test_attention_kernels.py tests/test_dropout.py

lint: $(READY)  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)  ## Mend what the formatter and the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fuzz: $(READY)  ## 10 000 random calls of the public functions
	FASTRPB_FUZZ=10000 $(BIN)/pytest tests/test_fuzz.py

bench: $(READY)  ## Measure speed and memory on this machine's CPU
	$(BIN)/fastrpb bench cpu

bench-model: $(READY)  ## Measure every attention with every positional encoding
	$(BIN)/fastrpb bench model

bench-gpu: $(READY)  ## Measure the kernels on this machine's GPU
	$(BIN)/fastrpb bench gpu

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
