# Needs python3 (3.10 or newer, with venv) and make; everything else goes into .venv.
PYTHON ?= python3
DEMO_ARGS ?=
PYTEST_ARGS ?=

BIN := .venv/bin
READY := .venv/.ready
DEMO_READY := .venv/.ready-demo

.DEFAULT_GOAL := help
.PHONY: help demo compare test test-slow test-browser lint format clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: $(DEMO_READY) ## train a small model for two minutes: its curve, a sample, a report (DEMO_ARGS for more)
	$(BIN)/anytime train --preset demo $(DEMO_ARGS)

compare: $(DEMO_READY) ## one anytime run against one schedule per stopping point
	$(BIN)/python examples/compare.py

test: lint ## lint, types and the quick tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not browser" $(PYTEST_ARGS)

test-slow: $(READY) ## the slow tests (none collected counts as success)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "slow and not browser" $(PYTEST_ARGS) || test $$? -eq 5

test-browser: $(READY) ## the report in a real browser; needs chromium
	$(BIN)/python -m pytest -m browser $(PYTEST_ARGS)

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

format: $(READY) ## rewrite the files as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment, the caches and the demo's runs
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist runs/demo runs/compare
	find . -type d -name __pycache__ -prune -exec rm -rf {} +

# The constraints fix torch's version, so pip never resolves another one.
$(DEMO_READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "error: '$(PYTHON)' is missing or older than Python 3.10; try: make PYTHON=/path/to/python3.10" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[train]"
	@touch $@

$(READY): $(DEMO_READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	@touch $@
