# `make` lists the targets. `make demo` and `make test` need nothing but python3: they build .venv themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Compiled modules are kept, whatever the environment says: the tests start a hundred processes that import them.
export PYTHONDONTWRITEBYTECODE :=
INSTALLED := $(VENV)/.installed

.PHONY: help install demo test test-long test-versions servers fuzz check docs notebook benchmarks

help:
	@echo "make install          create .venv with everything the project needs"
	@echo "make demo [SIZE=xl]   compare sluice with five other ways to load, on this machine"
	@echo "make test             the tests that CI runs"
	@echo "make test-long        all tests, with full counts"
	@echo "make test-versions [ENVIRONMENTS='oldest newest'] the core profile with other versions of Python, torch, ..."
	@echo "make servers          install the object stores that tests start, into .servers"
	@echo "make fuzz [SECONDS=60] fuzz every parser, SECONDS for each"
	@echo "make check            lint, format, types, layers, phrases, the package and the documentation's links"
	@echo "make docs             build the documentation site into site/"
	@echo "make notebook [SIZE=xl] run the notebook and keep its outputs"
	@echo "make benchmarks       tables of loads, saves, small loads, ranks and the network in two hours, with 30 GB"

install: $(INSTALLED)

# The stamp is newer than both files while .venv holds what they ask for.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet 'pip>=25.1,<27'  # the first that knows dependency groups
	$(BIN)/pip install --quiet -c constraints.txt -e '.[bench,hf,hash,remote,hub,quantize,gguf,merge,delta]' --group dev --group docs
	$(BIN)/pip install --quiet -c constraints.txt --no-deps mergekit  # an oracle of tests, whose own pins exclude ours
	touch $@

demo: install
	$(BIN)/sluice bench --out demo-out $(if $(SIZE),--size $(SIZE))

# Each worker takes whole stretches of files, so that what a module's tests share is made once, and the first that is
# done takes half of what the other has left.
TEST := $(BIN)/pytest -n 2 --dist worksteal

test: install
	$(TEST) -m 'not long'

test-long: install
	$(TEST) --hypothesis-profile=long --timeout=1800 -o faulthandler_timeout=1700

# Environments are kept outside the checkout; see tools/version_environments.py.
test-versions: install
	$(BIN)/python -m tools.test_versions $(ENVIRONMENTS) $(if $(WITHIN),--within $(WITHIN))

# Their needs would change those of the project, so packages of Python are in a directory of their own.
servers: install
	npm install --silent --no-audit --no-fund --ignore-scripts --prefix .servers azurite@3.37.0 s3rver@3.7.1
	$(BIN)/pip install --quiet --no-deps --target .servers/python --upgrade -r tests/servers.txt

SECONDS ?= 60
fuzz: install
	$(BIN)/pip install --quiet -c constraints.txt --group fuzz
	set -e; for target in $$($(BIN)/python -m fuzz.targets); do $(BIN)/python -m fuzz $$target --seconds $(SECONDS); done

check: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/check_phrases.py
	$(BIN)/python tools/lines.py
	$(BIN)/python tools/check_package.py
	$(MKDOCS) --site-dir $(VENV)/site
	! grep -rlE --include='*.html' '<(script|link|img)[^>]+(src|href)="https?:' $(VENV)/site  # reading sends no requests

# A warning, such as a broken link or a page that is not in the navigation, is an error. The variable silences news.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

docs: install
	$(MKDOCS)

notebook: install
	SLUICE_NOTEBOOK_SIZE=$(or $(SIZE),medium) $(BIN)/jupyter execute --inplace notebooks/memory_efficient_loading.ipynb

# Unattended, on a machine that does nothing else. A benchmark that misses its goal fails, and the next one begins.
BENCH := $(BIN)/python -m bench
benchmarks: install
	-$(BENCH).load --size large --runs 5 --minutes 78 --directory bench-out/files
	-$(BENCH).save --directory bench-out/files
	-$(BENCH).index
	-$(BENCH).small --seconds 10
	-$(BENCH).ranks --runs 2 --file shards --directory bench-out/files
	-$(BENCH).remote --minutes 14 --directory bench-out/files
	-$(BENCH).summary bench-out/load.json
	rm -r bench-out/files
