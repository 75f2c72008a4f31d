# Every target builds .venv first if needed, from PYTHON=... or the first Python that serves.

VENV_PYTHON := .venv/bin/python
# the first of these that is new enough and can make virtual environments
PYTHONS = $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11)
SUITABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))

# compiled extensions stay with this environment
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.venv/torch_extensions
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# a process a core, up to four; each computes with one thread
PYTEST := $(VENV_PYTHON) -m pytest --numprocesses logical --maxprocesses 4 --dist loadgroup --durations=10

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train paper test check lint format hooks

help: ## list these targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1@/p' Makefile | while IFS=@ read -r name text; do \
		printf '%-14s %s\n' "$$name" "$$text"; done

train: .venv/installed ## train the quick-start model; ARGS="attention=softmax" changes options
	@echo "Training: python train.py $(ARGS)"
	@$(VENV_PYTHON) train.py $(ARGS)

paper: .venv/installed ## compute the paper's tables and figures; ARGS="items=[figure_7]" chooses
	@echo "Computing: python scripts/paper.py $(ARGS)"
	@$(VENV_PYTHON) scripts/paper.py $(ARGS)

test: .venv/installed ## run every test; ARGS="-k shards" chooses
	@echo "Testing: every test, about 16 minutes on 2 cores (those that need a GPU are skipped without one)"
	@$(PYTEST) $(ARGS)

check: lint ## lint, types and the fast tests
	@echo "Testing: the fast tests"
	@$(PYTEST) -m "not slow and not gpu" $(ARGS)

lint: .venv/installed ## ruff and mypy
	@echo "Checking style (ruff) and types (mypy)"
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .
	@$(VENV_PYTHON) -m mypy

format: .venv/installed ## rewrite the code in the project's format
	@echo "Formatting (ruff)"
	@$(VENV_PYTHON) -m ruff check --fix .
	@$(VENV_PYTHON) -m ruff format .

hooks: .venv/installed ## run lint before every git commit
	@echo "Installing the git hook (pre-commit)"
	@$(VENV_PYTHON) -m pre_commit install

# written last, so an install that failed or was interrupted is done again
.venv/installed: pyproject.toml constraints.txt
	@if ! $(VENV_PYTHON) -m pip --version >/dev/null 2>&1; then \
		for python in $(PYTHONS) none; do $$python -c "$(SUITABLE)" 2>/dev/null && break; done; \
		if [ $$python = none ]; then \
			echo "error: no Python 3.11 or newer with the venv and ensurepip modules among:" \
			"$(PYTHONS); try make PYTHON=/path/to/python" >&2; exit 1; fi; \
		echo "Creating the virtual environment .venv with $$python"; \
		$$python -m venv --clear .venv; fi
	@echo "Installing the project and its packages into .venv (several minutes the first time)"
	@$(VENV_PYTHON) -m pip install --constraint constraints.txt --editable '.[demo,paper,test,dev]'
	@touch $@
