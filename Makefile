# Two commands are enough: `make demo` (an incident to watch) and `make test` (everything). Both do their own set-up.
PYTHON := .venv/bin/python
PYTEST := .venv/bin/pytest
CORES := $(shell nproc)
WORKERS := $(shell expr '(' 3 '*' $(CORES) + 1 ')' / 2)  # half as many again as cores, because many tests wait
# Modules stay whole, so that what their tests share is made once; long ones come first (tests/conftest.py).
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PROGRAMS := exporter plugin tests lab docs/generate deploy
# Hundreds of processes start in the tests. Without its compiled form each would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test check lint types generated compiled unit generate lock clean help test-fast fuzz accuracy alert-proof bench test-gpu image-test lab

help:            ## this list
	@grep -hE '^[a-z -]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

demo:            ## a simulated node: healthy, KV pressure, alert, mitigated (3 minutes; ARGS="--for 60")
	@.ci/setup.sh demo
	@$(PYTHON) -m lab.demo $(ARGS)

test:            ## everything: lint, types, generated files, all tests
	@.ci/setup.sh test
	@$(MAKE) --no-print-directory --jobs=$(CORES) --output-sync=target types compiled lint generated
	@$(MAKE) --no-print-directory unit

test-fast:       ## the tests that start no server and no browser, and are quick
	@.ci/setup.sh test
	$(PYTEST) -n $(CORES) --dist worksteal -q -m "not live and not slow"

lint:            ## ruff, codespell, hadolint, zizmor (workflows)
	$(PYTHON) -m ruff check $(PROGRAMS)
	$(PYTHON) -m ruff format --check --quiet $(PROGRAMS)
	.venv/bin/codespell
	.venv/bin/hadolint Dockerfile
	.venv/bin/zizmor --offline --quiet .github

types:           ## mypy --strict
	$(PYTHON) -m mypy

generated:       ## every generated file is what its generator makes today
	$(PYTHON) -m kvpressure bundle --check
	$(PYTHON) deploy/generate.py --check
	$(PYTHON) -m docs.generate --check

compiled:        ## the tests as bytecode, once for all processes that will import them
	@$(PYTEST) --collect-only -q >/dev/null || $(PYTEST) --collect-only -q

unit:            ## all tests, in parallel; those in real time first, with no more processes than cores
	$(PYTEST) -n $(CORES) --dist loadfile -q -m real_time $(shell grep -rl --include='test_*.py' mark.real_time tests)
	$(PYTEST) $(PARALLEL) -q -m "not real_time"

generate:        ## write the generated files: rules, dashboards, runbooks, references, chart, manifests
	$(PYTHON) -m kvpressure bundle
	$(PYTHON) deploy/generate.py
	$(PYTHON) -m docs.generate

fuzz:            ## cases for every parser and for whole snapshots (ARGS="--minutes 30")
	@.ci/setup.sh test
	$(PYTHON) -m tests.fuzz $(ARGS)

accuracy alert-proof bench test-gpu image-test: ## what the README claims, measured again
	@$(MAKE) --no-print-directory -C lab $@ ARGS="$(ARGS)"

lab:             ## the laboratory's own tests, and what it can measure
	@.ci/setup.sh test
	$(PYTEST) $(PARALLEL) -q lab/tests
	@$(MAKE) --no-print-directory -C lab help

lock:            ## renew requirements/*.txt
	lab/supply/lock.sh

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
