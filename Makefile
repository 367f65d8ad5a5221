# A fresh machine needs only python3 (>= 3.11) and make. PYTHON=python3.13 has an environment of its own.
DEFAULT := python3
PYTHON  ?= $(DEFAULT)
VERSION  = $(shell $(PYTHON) -c 'import sys; print("%d.%d%s" % (*sys.version_info[:2], sys.abiflags))')
VENV    := $(if $(filter $(DEFAULT),$(PYTHON)),.venv,.venv-$(or $(VERSION),$(error $(PYTHON) does not start)))
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
LOWEST  := .venv-lowest
DOCS    := .venv-docs
DIST    := .venv-dist

# The tests start a thousand processes: where an environment keeps no bytecode, each would compile all modules anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo serve test test-all test-lowest test-ray fuzz lint bench bench-policies chaos chaos-mutants worlds conformance docs docs-serve dist clean

help: ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/'

setup: $(STAMP)  ## create .venv with everything the demo, the tests and the linters need

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(STAMP)

demo: setup      ## serve handwritten digits over HTTP to many clients and check every answer
	$(BIN)/carpool demo

serve: setup     ## serve the digits model on http://127.0.0.1:8000
	$(BIN)/carpool serve examples.digits:service

test: setup      ## run the tests in about four minutes, three at a time: each promise, with some of the cases; TESTS=folders
	$(BIN)/python -m pytest -n 3 --dist worksteal $(TESTS)

test-all: setup  ## run all tests with all cases in a quarter of an hour, FUZZ_MINUTES=3 of random programs among them, and those on Ray if it is installed
	$(if $(FUZZ_MINUTES),FUZZ_MINUTES=$(FUZZ_MINUTES)) $(BIN)/python -m pytest -n 3 --dist worksteal -m "not ray"
	if $(BIN)/python -c 'import ray' 2>/dev/null; then $(MAKE) test-ray; fi

test-lowest:     ## run the tests with the oldest Python and the lowest versions that pyproject.toml allows; TESTS=folders
	oldest=$$($(PYTHON) -m bench.tools.pythons oldest) && $(MAKE) --no-print-directory $(LOWEST)/.installed PYTHON="$$oldest"
	$(LOWEST)/bin/python -m pytest -n 3 --dist worksteal $(TESTS)

$(LOWEST)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(PYTHON) -m bench.tools.lowest >$(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c $(LOWEST)/lowest.txt
	@touch $@

test-ray: setup  ## run the tests on a Ray cluster of three local nodes; they are skipped where Ray is not installed
	$(BIN)/python -m pytest -m ray tests/on_ray

fuzz: setup      ## noise for all that reads frames or bodies, FUZZ_EXAMPLES=20000 per test, then MINUTES=60 of random programs; SEED=, JOBS=2
	FUZZ_EXAMPLES=$(or $(FUZZ_EXAMPLES),20000) $(BIN)/python -m pytest -q --timeout 0 -m "long or not long" tests/engine/wire tests/engine/drive/test_heard.py tests/http/test_lies.py
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),60) --jobs $(or $(JOBS),2) $(if $(SEED),--seed $(SEED))

lint: setup      ## ruff (style, format), mypy --strict, the size of the house, and both type checkers over all programs of the docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.house
	$(BIN)/python -m tests.typing.programs

bench: setup     ## run the benchmarks against the peers, 80 minutes (`python -m bench` lists all there are)
	$(BIN)/python -m bench alone.core_overhead documents peers.inprocess peers.process peers.http

bench-policies: setup  ## simulate all policies on all workloads, into docs/policies-evidence.md; QUICK=1: a tenth, only shown
	$(BIN)/python -m bench.policies $(if $(QUICK),--quick,--docs)

chaos: setup     ## kill workers under load for MINUTES=2 and check every answer; SEED=, TARGET=ray|mosec|litserve, DOCS=1
	$(if $(TARGET),,$(if $(MINUTES),FUZZ_MINUTES=$(MINUTES)) $(BIN)/python -m pytest -m long)
	$(if $(TARGET),,$(BIN)/python -m tests.engine.core.cancel_storm $(if $(SEED),--seed $(SEED)))
	$(if $(filter ray,$(TARGET)),unshare --net --pid --fork --mount-proc --kill-child) \
	    $(BIN)/python -m bench.chaos --target $(or $(TARGET),carpool) --minutes $(or $(MINUTES),2) \
	    $(if $(SEED),--seed $(SEED)) $(if $(DOCS),--docs)

worlds: setup    ## the core in WORLDS=20000 random graphs and schedules of everything, and each of its rules broken once
	CARPOOL_CHAOS_SCHEDULES=$(or $(WORLDS),20000) $(BIN)/python -m pytest -n 2 -m "" \
	    tests/engine/core/test_worlds.py tests/engine/core/test_world_mutants.py

conformance: setup  ## run the clients of other servers against ours, each in its own environment, and write docs/clients.md
	$(BIN)/python -m conformance --docs

chaos-mutants: setup  ## break carpool's promises one by one, and see that the soak finds each
	$(BIN)/python -m bench.chaos.mutants

docs: $(DOCS)/.installed  ## build the site of the documentation into build/site, strictly, and follow its links
	$(DOCS)/bin/python -m bench.site

docs-serve: docs ## show the site on http://127.0.0.1:8001
	$(DOCS)/bin/python -m http.server --bind 127.0.0.1 --directory build/site $(or $(PORT),8001)

$(DOCS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --group docs
	@touch $@

dist: $(DIST)/.installed  ## build wheel and sdist into dist/, and check them
	rm -rf dist
	$(DIST)/bin/python -m build
	$(DIST)/bin/python -m bench.tools.small_wheel dist/*.whl
	$(DIST)/bin/python -m twine check --strict dist/*

$(DIST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(DIST)/bin/python -m pip install --quiet --disable-pip-version-check --group dist
	@touch $@

clean:           ## remove the virtual environment and caches
	rm -rf .venv .venv-* build dist .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
