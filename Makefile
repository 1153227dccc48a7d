# `make demo` and `make test` create .venv with all they need; serve and the gpu targets use the python3 that is installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
DEMO_ARGS ?=
BENCH_ARGS ?=
SERVE_ARGS ?=
TORCH ?= 2.11.0
OTHER := .venv-torch-$(TORCH)
GPU_ENV := MGLU_REQUIRE_GPU=1
# As many processes as the GPU has memory for, at 6 GB each, and at most 12.
GPU_JOBS ?= $(shell nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits \
	| awk 'NR == 1 { n = int($$1 / 6000); print (n > 12 ? 12 : n < 1 ? 1 : n) }')

# Tests start many Python processes, which would each compile the same modules and assertions again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve test test-all test-long lint types unit unit-long test-torch dist gpu-install gpu-test gpu-sanitize gpu-bench clean

demo: $(VENV)/.ready
	OMP_WAIT_POLICY=passive $(BIN)/python examples/demo.py $(DEMO_ARGS)

# Trains a small model and asks vLLM's server for an answer, with the python3 and the vLLM that are installed.
serve: gpu-install
	$(PYTHON) examples/serve_vllm.py $(SERVE_ARGS)

# The checks for every change: about 4 minutes on 2 idle cores, and 7 to 8 in a fresh clone.
test: lint types unit

# All that can be checked without a GPU, as continuous integration does.
test-all: test test-long

# What `make test` leaves out: the long tests, properties with more examples, and those of a GPU, which say if there is none.
test-long: unit-long

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

types: $(VENV)/.ready
	$(BIN)/mypy

unit: $(VENV)/.ready
	HYPOTHESIS_PROFILE=quick $(PYTEST) -m "not long and not gpu"

unit-long: $(VENV)/.ready
	@echo "The long tests take 20 to 35 minutes on two idle cores."
	$(PYTEST) -m "long or hypothesis or gpu" --durations=25

# The tests for every change of what depends most on torch, with another version: make test-torch TORCH=2.15.0
test-torch:
	$(PYTHON) -m venv $(OTHER)
	grep -v '^torch==\|^triton==\|^numpy==\|^setuptools==\|^cuda-\|^nvidia-' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt torch==$(TORCH) --editable ".[dev]"
	$(OTHER)/bin/python -m pytest -n 2 --dist worksteal -m "not long and not gpu" \
		tests/operators tests/passes tests/nn tests/packaging/test_export.py

# Builds the sdist and the wheel, and runs README's snippets with each, in a fresh environment that borrows torch from
# .venv.
dist: $(VENV)/.ready
	rm -rf build dist
	$(BIN)/python -m build
	for package in dist/*; do \
		$(PYTHON) -m venv --clear build/venv && build/venv/bin/python -m pip install --quiet --no-deps $$package && \
		$(BIN)/python -c "import torch; print(torch.__path__[0] + '/..')" > build/torch.pth && \
		cp build/torch.pth build/venv/lib/python3*/site-packages && MGLU_README_PYTHON=$(CURDIR)/build/venv/bin/python \
			$(BIN)/python -m pytest tests/commands/test_readme.py -k snippets || exit 1; \
	done

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# Installs only this project, without its dependencies and without the network, for the python3 that is installed.
gpu-install:
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation --no-index --editable .

# Tests of correctness share the GPU, since the compiler of the kernels takes most of the time, and runs on the CPU. Those
# that are marked `alone` run after them, one at a time. make gpu-test GPU_JOBS=4 GPU_TEST_ARGS="-k packing"
gpu-test: gpu-install
	$(GPU_ENV) $(PYTHON) -m pytest -m "gpu and not alone" -n $(GPU_JOBS) --dist worksteal tests/gpu $(GPU_TEST_ARGS) \
		--ignore tests/gpu/test_sanitizer.py
	$(GPU_ENV) $(PYTHON) -m pytest -m "gpu and alone" tests/gpu

# The kernels under compute-sanitizer.
gpu-sanitize: gpu-install
	$(GPU_ENV) $(PYTHON) -m pytest tests/gpu/test_sanitizer.py

# All of benchmarks/results that a GPU measures: make gpu-bench BENCH_ARGS="one_token plots"
gpu-bench: gpu-install
	$(PYTHON) -m mglu_ops bench $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .venv-torch-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
