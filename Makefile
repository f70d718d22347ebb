# The commands of development. They need make and Python 3.11 to 3.13 with venv, and fetch the rest into this folder.

PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest

# Compiled models survive from run to run; the runtime reads this as its setting runtime.compilation_cache_dir.
export RSRV_RUNTIME__COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/xla

# The theme warns about its successor; the documentation's tools are pinned.
export NO_MKDOCS_2_WARNING := 1

# Processes that share the tests, two more than two cores, because tests of servers wait.
WORKERS ?= 4

SERVING := .venv/.serving
VENV := .venv/.stamp
FRAMEWORKS := .venv/.frameworks
TRITON := .triton/.stamp
BROWSER := .browser/.stamp
GPU := .gpu/.stamp
NATIVE := triton_backend/rsrv/native/libtriton_rsrv.so

# tritonserver is installed and the native front built at the same time. Several goals are made one after the other.
ifneq (,$(filter demo serve,$(if $(filter 1,$(words $(MAKECMDGOALS))),$(MAKECMDGOALS))))
MAKEFLAGS += --jobs=2
endif

.DEFAULT_GOAL := help
.PHONY: help lock bundles native demo serve gpu-folder test test-unit test-gpu test-native test-long test-wheel check-gpu check-structure chaos fuzz bench zoo pages lint docs dist

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' $(MAKEFILE_LIST)

FOUND = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# Every installation takes the versions of the lock, whichever extras and groups it asks for.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock

$(SERVING): pyproject.toml requirements.lock
	$(if $(filter 3.11 3.12 3.13,$(FOUND)),,$(error needs Python 3.11 to 3.13, found $(or $(FOUND),none); make PYTHON=python3.12 $(or $(MAKECMDGOALS),demo)))
	@echo "== .venv: what serving needs (a minute the first time)"
	@$(PYTHON) -m venv .venv
	@$(INSTALL) -e '.[serve]'
	@touch $@

$(VENV): $(SERVING)
	@echo "== .venv: the tools of development (a few minutes the first time)"
	$(INSTALL) 'pip>=25.1'  # the first that reads dependency groups
	$(INSTALL) -e '.[serve,export,hooks,sim,parquet]' --group dev
	@touch $@

$(FRAMEWORKS): $(VENV)
	@echo "== .venv: PyTorch, Flax and Equinox, for the real models among the examples, and for the tests"
	$(INSTALL) -e '.[export-hf,export-flax,export-equinox,export-onnx]' --group frameworks
	@touch $@

$(TRITON): $(SERVING) triton_backend/rsrv/triton_install.py
	@echo "== .triton: tritonserver for this machine"
	$(BIN)/python tools/local_triton.py
	@touch $@

$(BROWSER): $(VENV) tools/browser_install.py
	@echo "== .browser: a Chromium for the tests of the live page"
	$(BIN)/python tools/browser_install.py
	@touch $@

$(GPU): $(VENV) tests/gpu/install.py $(wildcard tests/gpu/driver/*)
	@echo "== .gpu: jax's CUDA plugin on a fake CUDA driver"
	$(BIN)/python tests/gpu/install.py
	@touch $@

$(NATIVE): tools/native_front.py $(wildcard triton_backend/rsrv/native/*.[ch]) | $(SERVING)
	@echo "== the native front (the first time with a compiler from PyPI, 100 MB)"
	$(BIN)/python tools/native_front.py

# Builds the native front into the package.
native: $(NATIVE)
	@echo "$(NATIVE) is built"

# Builds the example bundles into build/bundles.
bundles: $(FRAMEWORKS)
	$(BIN)/python tools/example_bundles.py

demo: $(SERVING) $(TRITON) $(NATIVE) ## serve seven small models until Ctrl-C, and show what rsrv does with them (ARGS=--once: end then)
	@$(BIN)/python tools/demo.py $(ARGS)

serve: $(SERVING) $(TRITON) $(NATIVE) ## serve the demo's models until Ctrl-C, live page on 8004 (BUNDLES=build/bundles: these bundles)
	$(BIN)/rsrv serve $(or $(BUNDLES),--demo) --tritonserver .triton/bin/tritonserver

test: $(FRAMEWORKS) $(TRITON) $(BROWSER) ## run all tests but the long ones
	$(PYTEST) -m "not long" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --ignore tests/gpu

test-unit: $(FRAMEWORKS) ## run the tests that need no server (COV=1: print which lines they reach)
	$(if $(COV),$(BIN)/coverage run -m pytest,$(PYTEST)) -m "not long" tests/unit -n $(WORKERS) --dist loadfile
	$(if $(COV),$(BIN)/coverage combine -q && $(BIN)/coverage report --skip-covered)

test-gpu: $(FRAMEWORKS) $(TRITON) $(GPU) ## run the tests of the GPU path, on XLA's CUDA client and a fake CUDA driver; no GPU is needed
	$(PYTEST) -m "not long" tests/gpu

# End-to-end tests of what either front does; what needs the Python front is skipped.
OVER_NATIVE := answers cold control devices errors lifecycle lifetime metrics scheduling traces
# Part of the end-to-end tests, over the native front. It takes two minutes.
test-native: $(FRAMEWORKS) $(TRITON) $(NATIVE)
	RSRV_STUB__FRONT=native $(PYTEST) -m "not long" -n $(WORKERS) --dist loadfile \
		$(patsubst %,tests/e2e/test_%.py,answers cold devices errors lifecycle lifetime)

test-long: $(FRAMEWORKS) $(TRITON) $(GPU) $(NATIVE) bundles ## run the tests that take minutes
	$(PYTEST) -m long --timeout=1800
	RSRV_STUB__FRONT=native $(PYTEST) --timeout=1800 $(OVER_NATIVE:%=tests/e2e/test_%.py)
	$(PYTEST) -m hypothesis --hypothesis-profile=thorough --timeout=1800 tests/unit -n $(WORKERS)

check-gpu: $(GPU) bundles ## compile the bundles for five GPUs without one, and compare the figures with the recorded ones (CHECK=--renew: record them)
	PYTHONPATH=.gpu/site $(BIN)/python tools/check_gpu.py $(CHECK)

chaos: $(VENV) $(TRITON) ## inject faults under load for ten minutes (docs/troubleshooting.md; CHAOS=--quick, or CHAOS='--only stub')
	$(BIN)/python -m tests.chaos $(CHAOS)

fuzz: $(VENV) $(TRITON) ## try 10,000 mutated bundles, misbehaving connections and runtimes, 25,000 malformed requests (docs/security.md; FUZZ="--first 10000")
	$(BIN)/python -m tests.fuzz $(FUZZ)

bench: $(VENV) $(TRITON) ## measure rsrv beside a plain Triton model (docs/benchmark.md; BENCH=--quick for a trial; bench-weights and others)
	$(BIN)/python -m tests.bench $(BENCH)

# The others are parts of tests.bench by name: make bench-weights, bench-gateway, bench-gateway.soak, bench-real.
bench-devices bench-weights bench-gateway bench-gateway.soak bench-real bench-openai bench-onnx: $(TRITON)
bench-real bench-smollm2 bench-onnx: $(FRAMEWORKS)
bench-%: $(VENV)
	$(BIN)/python -m tests.bench.$* $(BENCH)

# The zoo has an environment of its own. AGPL=1 adds a package under AGPL to it, with its models, for your machine only.
ZOO_VENV := build/zoo/.stamp
ZOO_PIP := build/zoo/bin/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock
$(ZOO_VENV): requirements.lock tests/zoo/requirements.txt tools/cuda_stubs.py
	@echo "== build/zoo: some thirty packages of models (2 GB or more)"
	$(PYTHON) -m venv build/zoo
	$(ZOO_PIP) 'pip>=25.1'  # the first that reads dependency groups
	$(ZOO_PIP) -e '.[export-hf]' --group frameworks
	$(ZOO_PIP) -r tests/zoo/requirements.txt
	build/zoo/bin/python tools/cuda_stubs.py build/zoo/stubs
	@touch $@

zoo: $(ZOO_VENV) ## export hundreds of PyTorch architectures of other packages, and write docs/what-exports.md (ZOO="--only timm --limit 5")
	$(if $(AGPL),$(ZOO_PIP) ultralytics)
	LD_LIBRARY_PATH=build/zoo/stubs HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 build/zoo/bin/python -m tests.zoo $(if $(AGPL),--agpl) $(ZOO)

pages: $(FRAMEWORKS) $(TRITON) $(BROWSER) ## regenerate tables and pictures in docs, gRPC stubs, and the constants of the native front
	$(BIN)/python tools/make_proto.py
	$(BIN)/python tools/native_rules.py
	$(BIN)/python tools/configuration_page.py
	$(BIN)/python tools/scheduler_page.py
	$(BIN)/python tools/state_diagrams.py
	$(BIN)/python tools/compatibility_page.py
	$(BIN)/python tools/simulator_page.py
	$(BIN)/python tools/memory_picture.py
	PYTHONPATH=tools $(BIN)/python -m tests.e2e.live_load docs/images/live-page.png
	PYTHONPATH=tools $(BIN)/python -m tests.e2e.gallery docs/images

# Writes the locks again. Versions stay where the requirements allow it; UPGRADE=1 takes the newest.
LOCK := $(BIN)/uv pip compile --quiet --no-config $(if $(UPGRADE),--upgrade) pyproject.toml
IMAGE := --python-version 3.12 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate
lock: $(VENV)
	$(LOCK) --universal --python-version 3.11 --group dev --group frameworks -o requirements.lock \
		$(patsubst %,--extra %,serve export-hf export-flax export-equinox export-onnx hooks parquet sim)
	$(LOCK) --extra serve --extra cuda13 $(IMAGE) -o docker/requirements.txt
	$(LOCK) --extra hooks --no-deps --no-emit-package numpy $(IMAGE) -o docker/requirements-hooks.txt

# Builds the documentation's site in build/site; warnings are errors.
docs: $(VENV)
	PYTHONPATH=tools DOCS_OF="rsrv at commit $$(git describe --always --dirty)" $(BIN)/python -m mkdocs build --strict

# Builds the wheel and the sdist in dist.
dist: $(VENV) $(NATIVE)
	$(BIN)/python -m build --no-isolation --outdir dist

# Makes a folder for `rsrv gpu check` on a machine without a network (docs/gpu.md).
gpu-folder: $(NATIVE) bundles
	$(BIN)/python tools/gpu_folder.py build/gpu-folder

test-wheel: $(FRAMEWORKS) $(TRITON) $(NATIVE) ## run tests on a freshly built wheel, without the source folders (PYTHONS="python3.12 python3.13": install it with each, and serve)
	$(BIN)/python tools/try_wheel.py $(PYTHONS:%=--python %)

check-structure: $(VENV) ## print the size of the source tree, and check its imports and names (CHECK=-v: list everything that is wrong)
	$(BIN)/python tools/check_structure.py $(CHECK)

lint: $(FRAMEWORKS) docs ## check style, types and the documentation (FIX=1: rewrite the sources in the project's style first)
	$(BIN)/ruff check $(if $(FIX),--fix)
	$(BIN)/ruff format $(if $(FIX),,--check)
	$(BIN)/mypy
