# The two commands of a newcomer are `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint format bench clean

demo: $(INSTALLED)
	$(BIN)/slipstream train examples/next-token.yaml

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: .venv/.installed-bench
	$(BIN)/python benchmarks/cpu_train.py

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

.venv/.installed-bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable ".[bench]"
	touch $@

.venv-peers/.installed: benchmarks/peers/data/requirements.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --requirement $<
	touch $@

.venv-ray/.installed: benchmarks/peers/server/requirements.txt
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --requirement $<
	touch $@

clean:
	rm -rf .venv .venv-peers .venv-ray .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
