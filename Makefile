# Two commands set tapdeck up: `make demo` and `make test`. Each makes the environment when it is missing.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test test-slow soak lint bench bench-console

demo: $(STAMP)  ## the whole job on this machine, no GPU needed
	$(BIN)/tapdeck demo --headless

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not soak"

test-slow: $(STAMP)  ## kills, repairs and parity with transformers, in full
	$(BIN)/python -m pytest -m "slow and not soak"

soak: $(STAMP)  ## more of them, by hand
	$(BIN)/python -m pytest -m soak

lint: $(STAMP)  ## the same checks as CI and pre-commit
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

bench: $(STAMP)  ## measures, never asserts
	$(BIN)/python tests/benchmarks/throughput.py

bench-console: $(STAMP)  ## bytes, first paint and processor share of console and supervisor
	$(BIN)/python tests/benchmarks/console_bytes.py
	$(BIN)/python tests/benchmarks/supervisor_idle.py

$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install -e '.[test]'
	touch $@
