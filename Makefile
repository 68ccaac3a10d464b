# Two commands are enough: `make demo` (an incident to watch) and `make test` (everything). Both do their own set-up.
PYTHON := .venv/bin/python
PYTEST := .venv/bin/pytest
CORES := $(shell nproc)
WORKERS := $(shell expr '(' 3 '*' $(CORES) + 1 ')' / 2)  # half as many again as cores, because many tests wait
# Modules stay whole, so that what their tests share is made once; long ones come first (tests/conftest.py).
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Hundreds of processes start in the tests. Without its compiled form each would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test check lint types generated compiled unit accuracy alert-proof situations mutate-rules rule-matrix bench-rules generate image-test arm64-test bench bench-node bench-replay bench-growth bench-churn bench-compare render-dashboards try-vllm try-api-server try-node test-vllm measure-mitigations live-transcripts test-gpu lock sbom advisories clean help test-fast bench-autoscaling fuzz soak docs-site

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

demo:            ## a simulated node: healthy, KV pressure, alert, mitigated (3 minutes; ARGS="--for 60")
	@tools/setup.sh demo
	@$(PYTHON) -m kvpressure demo $(ARGS)

test:            ## everything: lint, types, generated files, all tests
	@tools/setup.sh test
	@$(MAKE) --no-print-directory --jobs=$(CORES) --output-sync=target types compiled lint generated
	@$(MAKE) --no-print-directory unit

test-fast:       ## the tests that start no server and no browser, and are quick
	@tools/setup.sh test
	$(PYTEST) -n $(CORES) --dist worksteal -q -m "not live and not slow"

check: test

lint:            ## ruff, codespell, hadolint, zizmor (workflows)
	$(PYTHON) -m ruff check exporter plugin tests benchmarks deploy tools
	$(PYTHON) -m ruff format --check --quiet exporter plugin tests benchmarks deploy tools
	.venv/bin/codespell
	.venv/bin/hadolint Dockerfile
	.venv/bin/zizmor --offline --quiet .github

types:           ## mypy --strict
	$(PYTHON) -m mypy

generated:       ## every generated file is what its generator makes today
	$(PYTHON) -m kvpressure bundle --check
	$(PYTHON) deploy/generate.py --check
	$(PYTHON) -m tools.promises --check
	$(PYTHON) -m tools.reference --check
	$(PYTHON) -m tools.transcripts --check

compiled:        ## the tests as bytecode, once for all processes that will import them
	@$(PYTEST) --collect-only -q >/dev/null || $(PYTEST) --collect-only -q

unit:            ## all tests, in parallel; those in real time first, with no more processes than cores
	$(PYTEST) -n $(CORES) --dist loadfile -q -m real_time
	$(PYTEST) $(PARALLEL) -q -m "not real_time"

generate:        ## write the generated files: rules, dashboards, runbooks, references, chart, manifests
	$(PYTHON) -m kvpressure bundle
	$(PYTHON) deploy/generate.py
	$(PYTHON) -m tools.promises
	$(PYTHON) -m tools.reference
	$(PYTHON) -m tools.transcripts

image-test:      ## build the image without a container engine and check it (root, Debian 12, some minutes, 1 GiB)
	@tools/setup.sh test
	@tools/image/test.sh

arm64-test:      ## run the exporter with the image's arm64 wheels under emulation (Debian 12, some minutes, 400 MiB)
	@tools/setup.sh test
	@tools/image/arm64.sh

accuracy:        ## score the verdict on the ground truth, write docs/accuracy.md
	@tools/setup.sh test
	$(PYTHON) -m benchmarks.accuracy $(ARGS)

situations:      ## the labelled situations at three scrape intervals and with every series doubled (15 minutes)
	@tools/setup.sh test
	SITUATION_VARIANTS=15s,60s,150s,twice $(PYTEST) -q tests/bundle/test_labelled_situations.py

alert-proof:     ## a fortnight of production traffic and all recordings against the rules, write docs/alert-proof.md (10 CPU minutes)
	@tools/setup.sh test
	$(PYTHON) -m benchmarks.alerts $(ARGS)
	$(PYTHON) -m benchmarks.alerts.vllm_only

mutate-rules:    ## seed faults in the rules, count how many their tests notice, write docs/alerts.md (20 CPU minutes)
	@tools/setup.sh test
	$(PYTHON) -m tools.rules.mutate $(ARGS)
	$(PYTHON) -m kvpressure bundle

rule-matrix:     ## the rules before newer promtools, amtools and vmalert-tools, fetched with apt (Debian)
	@tools/setup.sh test
	$(PYTHON) -m tools.rules.matrix $(ARGS)

bench: bench-node bench-replay ## what the budgets ask for

bench-node:      ## CPU, memory and scrape latency for 8 GPUs x 8 engines at 1 s
	@tools/setup.sh test
	$(PYTHON) -m benchmarks.node $(ARGS)

bench-replay:    ## replay speed
	@tools/setup.sh test
	$(PYTHON) -m benchmarks.replay $(ARGS)

bench-growth:    ## the same from 8 to 64 engines, and 64 GPU partitions (10 minutes)
	@tools/setup.sh test
	$(PYTHON) -m benchmarks.growth $(ARGS)

bench-churn:     ## a simulated day of pods, engines and GPUs coming and going: is memory flat? (3 minutes; ARGS="--live 10": pods replaced at one address beside a quiet node)
	@tools/setup.sh test
	$(PYTHON) -m benchmarks.churn $(ARGS)

bench-compare:   ## what other Python GPU exporters cost on the same driver (installs them into build/; 6 minutes)
	@tools/setup.sh test
	$(PYTHON) -m benchmarks.compare $(ARGS)

bench-autoscaling: ## scaling on this exporter against scaling on the queue and on KV usage, simulated, write docs/autoscaling.md (5 minutes)
	@tools/setup.sh test
	$(PYTHON) -m benchmarks.autoscaling $(ARGS)

bench-rules:     ## what the rules cost a Prometheus with 1 000 nodes of 8 GPUs (10 minutes, 4 GiB)
	@tools/setup.sh test
	$(PYTHON) -m benchmarks.alerts.cost $(ARGS)

render-dashboards: ## pictures of the dashboards with Grafana's own libraries, and what is wrong with them (npm, 450 MB; optional)
	@tools/setup.sh test
	tools/render/render.sh $(ARGS)

try-vllm:        ## a real vLLM on the CPU under load, with the exporter scraping it (installs 3 GB into .vllm)
	@tools/setup.sh test
	tools/try-vllm.sh $(ARGS)

test-vllm:       ## a real vLLM through every kind of load, asserted (15 minutes; not part of make test)
	@tools/setup.sh test
	tools/test-vllm.sh $(ARGS)

measure-mitigations: ## the same overload of a real vLLM before and after every mitigation, write docs/mitigations.md (25 quiet minutes)
	@tools/setup.sh test
	tools/with-vllm.sh mitigations.py docs/mitigations.md $(ARGS)

live-transcripts: ## diagnose, probe and mitigate against a real vLLM under every load, write build/transcripts.md (12 minutes)
	@tools/setup.sh test
	tools/with-vllm.sh transcripts.py build/transcripts.md $(ARGS)

try-api-server:  ## chart, manifests, client and toolbox against a real API server (KUBE_APISERVER=PATH ETCD=PATH CUSTOM_RESOURCES=FOLDER)
	@tools/setup.sh test
	@$(PYTHON) -m tests.api_server $(ARGS)

try-node:        ## the chart, the image and the toolbox on a node of a real kubelet and containerd (programs as above, NODE_ROOT=FOLDER IMAGE=FILE)
	@tools/setup.sh test
	@$(PYTHON) -m tests.node $(ARGS)

# The one Python of this machine that has torch; nothing is installed for it.
GPU_PYTHON := python3

test-gpu:        ## ask a real NVIDIA GPU and driver whether all this is true there (20 minutes; ARGS="--list" says what)
	@$(GPU_PYTHON) -m tools.gpu $(ARGS)

lock:            ## renew requirements/*.txt
	tools/lock.sh

fuzz:            ## cases for every parser and for whole snapshots until there are a million of each, write docs/fuzz-and-soak.md (hours; ARGS="--minutes 30", or "--guided --minutes 1" with atheris)
	@tools/setup.sh test
	$(PYTHON) -m tests.fuzz $(ARGS)

soak:            ## faults in random order against the real process, an hour for each of three seeds, write docs/fuzz-and-soak.md (ARGS="--minutes 10 --seed 1")
	@tools/setup.sh test
	$(PYTHON) -m benchmarks.soak $(ARGS)

sbom:            ## list what the image installs with versions, licences and digests (CycloneDX), write build/sbom.cdx.json
	@tools/setup.sh test
	$(PYTHON) -m tools.supply.sbom build/sbom.cdx.json

advisories:      ## known vulnerabilities of what the image installs, by pip-audit where it and its data can be had
	@tools/setup.sh test
	$(PYTHON) -m tools.supply.advisories

docs-site:       ## all documents as a site with search, in build/site; a link that leads nowhere stops it (installs Sphinx into build/)
	@[ -x build/site-venv/bin/sphinx-build ] || python3 -m venv build/site-venv
	@build/site-venv/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/site.txt
	@build/site-venv/bin/python -m tools.site

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
