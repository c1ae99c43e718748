# Needs python3 (3.10 or newer, with venv) and make; everything else goes into .venv.
PYTHON ?= python3
DEMO_ARGS ?=
PYTEST_ARGS ?=

BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint format clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: $(READY) ## one anytime run against one schedule per stopping point (DEMO_ARGS=--quick for seconds)
	$(BIN)/python examples/demo.py $(DEMO_ARGS)

test: lint ## lint, types and the quick tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" $(PYTEST_ARGS)

test-slow: $(READY) ## the slow tests (none collected counts as success)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow $(PYTEST_ARGS) || test $$? -eq 5

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

format: $(READY) ## rewrite the files as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment, the caches and the demo's output
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist demo
	find . -type d -name __pycache__ -prune -exec rm -rf {} +

# The constraints fix torch's version, so pip never resolves another one.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "error: '$(PYTHON)' is missing or older than Python 3.10; try: make PYTHON=/path/to/python3.10" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	@touch $@
