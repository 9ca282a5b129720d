# Every target sets up .venv when it is missing or older than pyproject.toml, constraints.txt or the
# sources of the native kernels, which setting up compiles.
# After that no target needs a network.

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

# Tests start hundreds of processes; without this each may have to compile the package again.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
STAMP := .venv/.installed
SOURCES := $(wildcard forkserve tests scripts examples benchmarks hatch_build.py)
NATIVE := $(wildcard forkserve/kernels/native/*.cpp forkserve/kernels/native/*.h)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format types docs bench gpu triton clean asked

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh hatch_build.py $(NATIVE) | asked
	@bash scripts/setup.sh "$(PYTHON)"

# A PYTHON that was named must be that of a .venv which is there already.
asked:
	@$(if $(filter file,$(origin PYTHON)),,bash scripts/setup.sh --check "$(PYTHON)")

setup: $(STAMP) ## install everything into .venv

demo: $(STAMP) ## run the demo (ARGS="--backend mock --json")
	@$(BIN)/forkserve demo $(ARGS)

test: $(STAMP) ## run the tests (ARGS="tests/house -k docs", WORKERS=0: one process)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

lint: $(STAMP) ## format check, lint, import contracts
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/lint-imports --no-logo

format: $(STAMP) ## format and repair what can be repaired
	$(BIN)/ruff check --fix-only --quiet $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

types: $(STAMP) ## mypy --strict on the package
	$(BIN)/mypy --strict -p forkserve

docs: $(STAMP) ## write docs/reference.md from the code, then check every page
	$(BIN)/python scripts/reference.py
	@$(BIN)/python -m pytest -q tests/house/test_docs.py $(ARGS)

bench: $(STAMP) ## run the benchmarks
	@$(BIN)/python -m benchmarks $(ARGS)

gpu: ## GPU kernels: tests and benchmarks, with PYTHON as it is (torch, triton, numpy, rich, pytest)
	@$(PYTHON) -m benchmarks.gpu

triton: ## tests of the GPU kernels with the oldest torch and Triton, in .venv-triton (gigabytes)
	@bash scripts/triton_pair.sh $(ARGS)

clean: ## remove build products and caches, not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f forkserve/kernels/native/*.so
	find forkserve tests scripts benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
