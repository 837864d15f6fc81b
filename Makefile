# `make` lists the targets. `make demo` and `make test` need nothing but python3: they build .venv themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help install demo test test-long fuzz check

help:
	@echo "make install          create .venv with everything the project needs"
	@echo "make demo [SIZE=xl]   compare sluice with every other way to load, on this machine"
	@echo "make test             the tests that CI runs"
	@echo "make test-long        all tests, with full counts"
	@echo "make fuzz [SECONDS=60] fuzz every parser, for so many seconds each"
	@echo "make check            lint, format, types and layers"

install: $(INSTALLED)

# The stamp is newer than both files while .venv holds what they ask for.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,bench]'
	touch $@

demo: install
	$(BIN)/python -m bench.demo $(if $(SIZE),--size $(SIZE))

test: install
	$(BIN)/pytest -n 2 -m 'not long'

test-long: install
	$(BIN)/pytest -n 2 --hypothesis-profile=long --timeout=1800 -o faulthandler_timeout=1700

SECONDS ?= 60
fuzz: install
	$(BIN)/pip install --quiet -c constraints.txt -e '.[fuzz]'
	set -e; for target in $$($(BIN)/python -m fuzz.targets); do $(BIN)/python -m fuzz $$target --seconds $(SECONDS); done

check: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
