# Everything a developer runs. Needs make and a Python 3.11 to 3.13 with venv; the rest is fetched into this folder.

PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest

# Compiled models survive from run to run; the runtime reads this as its setting runtime.compilation_cache_dir.
export RSRV_RUNTIME__COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/xla

# Of the theme, about a successor; the documentation's tools are pinned.
export NO_MKDOCS_2_WARNING := 1

# Where there is no GPU; one with GPUs has its own idea.
NODE ?= --cpu-workers 2

# Processes that share the tests: those of servers wait more than they compute, so more than two cores.
WORKERS ?= 4

VENV := .venv/.stamp
FRAMEWORKS := .venv/.frameworks
TRITON := .triton/.stamp
BROWSER := .browser/.stamp

.DEFAULT_GOAL := help
.PHONY: help demo serve node test test-unit test-long chaos fuzz bench bench-weights bench-gpu bench-gateway models \
	soak-gateway pages house lint format clean bundles docs docs-serve dist test-wheel

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' $(MAKEFILE_LIST)

$(VENV): pyproject.toml
	@echo "== .venv: this project and its tools (a few minutes the first time)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

$(FRAMEWORKS): $(VENV)
	@echo "== .venv: PyTorch, Flax and Equinox, for the real models among the examples, and for the tests"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,frameworks]'
	@touch $@

$(TRITON): $(VENV) triton_backend/rsrv/serve/triton_install.py
	@echo "== .triton: tritonserver for this machine"
	$(BIN)/python tools/local_triton.py install
	@touch $@

$(BROWSER): $(VENV) tools/browser_install.py
	@echo "== .browser: a Chromium for the tests of the live page"
	$(BIN)/python tools/browser_install.py
	@touch $@

bundles: $(FRAMEWORKS) ## build the example bundles into build/bundles
	$(BIN)/python tools/example_bundles.py

demo: $(VENV) $(TRITON) ## serve the example bundles and classify the held-out digits
	$(BIN)/python tools/demo.py

serve: $(VENV) $(TRITON) bundles ## serve build/bundles, and follow its changes, on ports 8000 to 8002 until Ctrl-C; live page on 8004
	$(BIN)/rsrv-gen build/bundles -o gen
	$(BIN)/python tools/local_triton.py serve --model-repository=gen --model-control-mode=explicit '--load-model=*' \
		--exit-on-error=false

node: $(VENV) $(TRITON) bundles ## serve build/bundles with a server per device behind a gateway (NODE='--gpus 0,1')
	$(BIN)/rsrv-node build/bundles --directory build/node --tritonserver .triton/bin/tritonserver $(NODE)

test: $(FRAMEWORKS) $(TRITON) $(BROWSER) bundles ## all tests but the long ones
	$(PYTEST) -m "not long" -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

test-unit: $(FRAMEWORKS) ## the tests that need no server
	$(PYTEST) -m "not long" tests/unit -n $(WORKERS)

test-long: $(FRAMEWORKS) $(TRITON) bundles ## the tests that take minutes
	$(PYTEST) -m long --timeout=1800
	$(PYTEST) -m hypothesis --hypothesis-profile=thorough --timeout=1800 tests/unit -n $(WORKERS)

chaos: $(VENV) $(TRITON) ## ten minutes of faults under load (docs/faults.md; CHAOS=--quick, or CHAOS='--only stub')
	$(BIN)/python -m tests.chaos $(CHAOS)

fuzz: $(VENV) $(TRITON) ## 10,000 mutated bundles, connections and runtimes that misbehave, 20,000 bad requests (docs/security.md; FUZZ="--first 10000")
	$(BIN)/python -m tests.fuzz $(FUZZ)

bench: $(VENV) $(TRITON) ## measure rsrv beside a plain Triton model (docs/benchmark.md; BENCH=--quick for a trial)
	$(BIN)/python -m tests.bench $(BENCH)

bench-gpu: $(VENV) ## measure moving weights on a GPU (docs/weights.md; without one: only whether it works)
	$(BIN)/python -m tests.bench.gpu $(BENCH)

bench-weights: $(VENV) $(TRITON) ## measure models that do not all fit beside the same that do (BENCH=--quick for a trial)
	$(BIN)/python -m tests.bench.weights $(BENCH)

bench-gateway: $(VENV) $(TRITON) ## measure what a gateway costs, and a worker's death (docs/gateway-benchmark.md; BENCH=--quick)
	$(BIN)/python -m tests.bench.gateway $(BENCH)

models: $(FRAMEWORKS) $(TRITON) ## export, serve and measure the real models, and make the tables of docs/models.md anew (MODELS=--quick)
	$(BIN)/python -m tests.bench.real $(MODELS)

soak-gateway: $(VENV) $(TRITON) ## ten minutes of workers that come and go under load (SOAK=--quick)
	$(BIN)/python -m tests.bench.gateway.soak $(SOAK)

pages: $(VENV) $(TRITON) $(BROWSER) ## make what code makes again: tables and pictures in docs, dashboards, gRPC stubs
	$(BIN)/python tools/make_proto.py
	$(BIN)/python tools/configuration_page.py
	$(BIN)/python tools/dashboards.py
	$(BIN)/python tools/alerts_page.py
	$(BIN)/python tools/scheduler_page.py
	$(BIN)/python tools/state_diagrams.py
	$(BIN)/python tools/simulator_page.py
	$(BIN)/python tools/eviction_page.py
	$(BIN)/python -m tests.e2e.live_load docs/images/live-page.png

docs: $(VENV) ## the documentation as a site, in build/site; warnings are errors
	$(BIN)/python -m mkdocs build --strict --quiet

docs-serve: $(VENV) ## the same on http://127.0.0.1:8080, following changes
	$(BIN)/python -m mkdocs serve --livereload --dev-addr 127.0.0.1:8080

dist: $(VENV) ## the wheel and the sdist, in dist
	$(BIN)/python -m build --no-isolation --outdir dist

test-wheel: $(FRAMEWORKS) $(TRITON) bundles ## install a freshly built wheel, and run tests on it without the source folders
	$(BIN)/python tools/try_wheel.py

house: $(VENV) ## size and order of the source tree (HOUSE=-v: all that is out of order)
	$(BIN)/python tools/house.py $(HOUSE)

lint: $(FRAMEWORKS) docs ## style, types, and the documentation
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV) ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove everything that was fetched or built here
	rm -rf .venv .triton .browser .cache build gen dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
