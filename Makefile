# `make demo` and `make test` set up everything on a machine with Python 3.11 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Real data for tests and experiments, where it lies beside the project.
ifneq ($(wildcard ../shared/data),)
export ANYSIZE_DATA ?= $(abspath ../shared/data)
endif

.PHONY: demo test test-slow lint docs wheel check bench clean

demo: $(READY)
	@$(BIN)/anysize demo

test: $(READY)
	$(BIN)/pytest -n 2

test-slow: $(READY)
	$(BIN)/pytest -m slow

bench: $(READY)
	$(BIN)/python benchmarks/bench.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/doctrees . build/site
	@echo "the site: build/site/index.html"

wheel:
	PYTHON=$(PYTHON) .ci/wheel

check: lint test

$(READY): pyproject.toml requirements.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing the pinned dependencies, some minutes without output:"
	$(BIN)/pip install --disable-pip-version-check -q -r requirements.txt
	$(BIN)/pip install --disable-pip-version-check -q --no-deps --no-build-isolation -e .
	@touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
