# `make demo` and `make test` set up all they need in .venv; the gpu targets use the python3 that is there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
BENCH_ARGS ?=
TORCH ?= 2.11.0
OTHER := .venv-torch-$(TORCH)
GPU_ENV := MGLU_REQUIRE_GPU=1

.PHONY: demo test lint types unit test-torch gpu-install gpu-test gpu-bench clean

demo: $(VENV)/.ready
	OMP_WAIT_POLICY=passive $(BIN)/python -m mglu_ops demo $(DEMO_ARGS)

test: lint types unit

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

unit: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The fusion pass with another torch: make test-torch TORCH=2.15.0
test-torch:
	$(PYTHON) -m venv $(OTHER)
	grep -v '^torch==\|^triton==\|^numpy==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt torch==$(TORCH) --editable ".[dev]"
	$(OTHER)/bin/python -m pytest -n 2 --dist worksteal tests/passes tests/packaging/test_export.py

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# No network, no environment of our own: installs the project itself into the python3 at hand, and nothing else.
gpu-install:
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation --no-index --editable .

gpu-test: gpu-install
	$(GPU_ENV) $(PYTHON) -m pytest -m gpu tests

# All of benchmarks/results that a GPU gives: make gpu-bench BENCH_ARGS="one_token plots"
gpu-bench: gpu-install
	$(PYTHON) -m mglu_ops bench $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .venv-torch-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
