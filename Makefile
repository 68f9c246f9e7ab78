# make serve | test | test-all | test-nightly | test-next | test-vllm | test-vllm-next |
#      contract-next | check | bench | bench-compare | kernels | setup | setup-dev | setup-quant |
#      setup-dynamo | setup-all | smollm2 | lm_eval | chromium | lock | release | container | clean
#
#   PYTHON    the interpreter that .venv is made from (3.11 or later)
#   PIP_ARGS  passed to every `pip install`, for instance another package index
#   HOST, PORT, MODEL, ARGS   of `make serve`; ARGS goes to `vllm serve` as it is
#   NEXT      of `make test-next` and its like: the version of vLLM
#   PART      of `make test-vllm`: whole, or short, which takes a few minutes
#   WORKERS   of `make test`: processes that run tests at once; one starts every engine once
#   BASE      of `make bench-compare`: the commit that HEAD is compared with
#   TRITON    of `make kernels`: the version that compiles our kernels, for instance 3.6.0

PYTHON   ?= python3
PIP_ARGS ?=
HOST     := 127.0.0.1# not from the environment: some shells export the machine's name as HOST
PORT     ?= 8000
MODEL    ?= checkpoints/tiny-dllm
ARGS     ?=
WORKERS  ?= 2

VENV    := .venv
BIN     := $(VENV)/bin
QUANT   := .venv-quant
DYNAMO  := .venv-dynamo
NEXT    ?= 0.33.0
VLLM    := 0.32.0
PART    ?= whole
RELEASE := .venv-release
# Nothing is compiled to bytecode ahead: that takes longer than all the rest, for files rarely run.
PIP     := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-compile \
           $(PIP_ARGS)

# One thread: with more, each operation waits for the slowest, and a core that something else keeps
# busy makes a denoise step ten times slower. No binding: two servers would be bound to one core.
export OMP_NUM_THREADS ?= 1
export VLLM_CPU_OMP_THREADS_BIND ?= nobind
export VLLM_NO_USAGE_STATS ?= 1
export DO_NOT_TRACK ?= 1
# Some shells set it; every start would then compile 4000 modules to bytecode again, three times.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev setup-quant setup-dynamo setup-all smollm2 lm_eval chromium serve test test-all test-nightly test-next test-vllm test-vllm-next contract-next check lint types \
        bench bench-compare kernels lock release container clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

## Set-up: two stamps, so that a change of ours does not reinstall what is pinned.
setup: $(VENV)/.installed

$(VENV)/.locked: requirements/cpu.txt packaging/vllm-metadata/pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
	    "%s is Python %d.%d; 3.11 or later is needed: make setup PYTHON=python3.11" \
	    % (sys.executable, v.major, v.minor))'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned packages of requirements/cpu.txt; the first time takes minutes."
	@# pip keeps one core busy: two run at once, on shuffled lines, so that both have as much to do.
	sed '/^#/d' requirements/cpu.txt | sort -R --random-source=/dev/zero | \
	    xargs -d '\n' -P 2 -n 40 $(PIP)
	@$(BIN)/python -c 'import importlib.metadata as m, sys; \
	    any("nvidia" in r or "cuda" in r for r in m.requires("torch")) and sys.exit( \
	    "pip found a CUDA build of torch, which needs packages that are not installed here. Name " \
	    "the CPU wheel index of PyTorch in PIP_ARGS (docs/serving.md), then: make clean setup PIP_ARGS=...")'
	$(PIP) --no-build-isolation ./packaging/vllm-metadata
	@touch $@

$(VENV)/.installed: $(VENV)/.locked pyproject.toml dllm/__init__.py attention/__init__.py quant/__init__.py
	$(PIP) --no-build-isolation --editable .
	@touch $@

# Tests and checks, and Triton, which they compile our GPU kernels with. Serving on a CPU needs none.
setup-dev: setup $(VENV)/.dev checkpoints/tiny-random/model.safetensors

$(VENV)/.dev: requirements/dev.txt $(VENV)/.locked
	$(PIP) -r requirements/dev.txt
	@touch $@

checkpoints/tiny-random/model.safetensors: bench/toys/tiny.py checkpoints/tiny-random/config.json | $(VENV)/.installed
	$(BIN)/python -m bench.toys.tiny
	@touch $@

# What `dllm quantize` runs in. It loads our package by its path (dllm/quantize/command.py).
setup-quant: $(QUANT)/.locked

$(QUANT)/.locked: requirements/quant.txt
	$(PYTHON) -m venv $(QUANT)
	@echo "Installing the pinned packages of requirements/quant.txt."
	$(subst $(BIN),$(QUANT)/bin,$(PIP)) -r requirements/quant.txt
	@touch $@

# Dynamo's runtime, which runs in a process of its own (dllm/remote/discovery.py).
setup-dynamo: $(DYNAMO)/.locked

$(DYNAMO)/.locked: requirements/dynamo.txt
	$(PYTHON) -m venv $(DYNAMO)
	$(subst $(BIN),$(DYNAMO)/bin,$(PIP)) -r requirements/dynamo.txt
	@touch $@

# Off Python's path: only the tests of images see it (tests/models/test_images.py).
$(VENV)/.images: requirements/images.txt $(VENV)/.locked
	rm -rf $(VENV)/torchvision
	$(PIP) --target $(VENV)/torchvision -r requirements/images.txt
	@touch $@

# Off Python's path: only bench/local.py sees it.
$(VENV)/.diffusers: requirements/parity.txt $(VENV)/.locked
	rm -rf $(VENV)/diffusers
	$(PIP) --target $(VENV)/diffusers -r requirements/parity.txt
	@touch $@

# The official JSON-Schema-Test-Suite, which the sources of the package jsonschema hold.
$(VENV)/.jsonschema-suite: $(VENV)/.locked
	rm -rf $(VENV)/jsonschema-suite
	$(BIN)/python -m pip download --disable-pip-version-check --quiet --no-deps --no-binary jsonschema \
	    --dest $(VENV)/jsonschema-suite $(PIP_ARGS) jsonschema==4.26.0
	tar --extract --gzip --directory $(VENV)/jsonschema-suite --strip-components 3 --wildcards \
	    --file $(VENV)/jsonschema-suite/jsonschema-4.26.0.tar.gz '*/json/tests/draft2020-12'
	@touch $@

# Off Python's path: only tests/server/test_server_decision_clients.py sees it.
$(VENV)/.clients: requirements/clients.txt $(VENV)/.locked
	rm -rf $(VENV)/clients
	$(PIP) --target $(VENV)/clients -r requirements/clients.txt
	@touch $@

# Off Python's path: docs/clients.md says how to use it.
lm_eval: $(VENV)/.lm_eval

$(VENV)/.lm_eval: requirements/lm_eval.txt $(VENV)/.locked
	rm -rf $(VENV)/lm_eval
	$(PIP) --target $(VENV)/lm_eval -r requirements/lm_eval.txt
	@touch $@

# All that tests use, but the browser and SmolLM2; what is missing has its tests skipped.
setup-all: setup-dev setup-quant setup-dynamo lm_eval \
    $(addprefix $(VENV)/,.images .diffusers .clients .jsonschema-suite)

# The target of docs/calibration.md, a folder of safetensors; tests that need it are skipped without.
smollm2: $(VENV)/smollm2

$(VENV)/smollm2: requirements/smollm2.txt requirements/smollm2.py $(VENV)/.locked
	rm -rf $(VENV)/gguf
	$(PIP) --target $(VENV)/gguf -r requirements/smollm2.txt
	$(BIN)/python requirements/smollm2.py $(VENV)/gguf $@
	rm -rf $(VENV)/gguf
	@touch $@

# The browser in which tests/server/test_canvas_page.py tries the page; without it they are skipped.
chromium:
	command -v chromium || (apt-get update && apt-get install --yes --no-install-recommends chromium)

# The KV cache is bounded because vLLM otherwise takes most of the memory, and clears it before it is
# ready; ARGS can say otherwise. Processes are forked, because spawned ones import everything again.
# The last of the plugins is the page /canvas.
serve: export HF_HUB_OFFLINE ?= $(if $(wildcard $(MODEL)/config.json),1,0)
serve: export VLLM_WORKER_MULTIPROC_METHOD ?= fork
serve: export VLLM_PLUGINS ?= dllm,dllm_namesakes,dllm_canvas
serve: setup
	@$(BIN)/python -c 'import sys; from dllm.settings.checks import missing_folder; \
	    sys.exit(missing_folder("$(MODEL)"))'
	@$(BIN)/python -c 'import socket, sys; \
	    family = socket.AF_INET6 if ":" in "$(HOST)" else socket.AF_INET; \
	    socket.socket(family).connect_ex(("$(HOST)", $(PORT))) or sys.exit( \
	    "Port $(PORT) is taken, perhaps by another server; give another one: make serve PORT=...")'
	$(BIN)/vllm serve $(MODEL) --host $(HOST) --port $(PORT) --kv-cache-memory-bytes 256M $(ARGS)

# `make test-all` runs the tests that are marked `extended`, too; `make test-nightly` those alone
# that are marked `nightly`.
test: SELECT := -m "not extended and not nightly"
test-all: SELECT := -m "not nightly"
test-nightly: SELECT := -m nightly --timeout 3600
test test-all test-nightly: export HF_HUB_OFFLINE ?= 1
test-all: lm_eval $(addprefix $(VENV)/,.images .clients)
test-nightly: setup-dev
test test-all: setup-dev setup-quant $(addprefix $(VENV)/,.diffusers .jsonschema-suite)
test: REST := make test-all, with what other families and longer runs are asked
test-all: REST := make test-nightly
test test-all test-nightly:
	$(BIN)/python -m pytest --numprocesses $(WORKERS) $(SELECT) $(ARGS)
	@$(if $(REST),echo "The rest: $(REST).")

# The same with the vLLM that comes next, of which there is no vllm-cpu (requirements/vllm_overlay.py).
ON_NEXT = PYTHONPATH=$(CURDIR)/$(VENV)/vllm-$(NEXT):$(CURDIR)

test-next: $(VENV)/.vllm-$(NEXT)
	$(ON_NEXT) $(MAKE) test-all

# vLLM's own tests with our checkpoints (tests/vllm_suite).
test-vllm: setup-dev
	@if $(MAKE) $(VENV)/.vllm-tests-$(VLLM); then \
	    $(BIN)/python tests/vllm_suite/run.py $(VENV)/vllm-tests-$(VLLM) --part $(PART) $(ARGS); \
	elif [ -z "$$CI" ]; then \
	    echo "Skipped: pip did not get vLLM's sources, which hold its tests; it needs a package index."; \
	else exit 1; fi

test-vllm-next: $(VENV)/.vllm-$(NEXT)
	$(ON_NEXT) $(MAKE) test-vllm VLLM=$(NEXT)

# vLLM's sources are not built: pip asks them for their metadata alone, for which they need a few tools.
$(VENV)/.vllm-tests-%: requirements/vllm_tests.txt $(VENV)/.locked
	rm -rf $(VENV)/vllm-tests-$*
	$(PIP) --target $(VENV)/vllm-tests-$*/tools -r requirements/vllm_tests.txt
	PYTHONPATH=$(CURDIR)/$(VENV)/vllm-tests-$*/tools VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$* \
	    $(BIN)/python -m pip download --disable-pip-version-check --quiet --no-deps \
	    --no-binary vllm --no-build-isolation --dest $(VENV)/vllm-tests-$* $(PIP_ARGS) vllm==$*
	tar --extract --gzip --directory $(VENV)/vllm-tests-$* --strip-components 1 --wildcards \
	    --file $(VENV)/vllm-tests-$*/vllm-$*.tar.gz '*/tests' '*/examples' '*/pyproject.toml'
	rm $(VENV)/vllm-tests-$*/vllm-$*.tar.gz
	@touch $@

contract-next: setup-dev $(VENV)/.vllm-$(NEXT)
	$(ON_NEXT) $(BIN)/python -m pytest tests/patches/test_contract.py \
	    tests/patches/test_contract_objects.py tests/cpu $(ARGS)

$(VENV)/.vllm-$(NEXT): requirements/vllm_overlay.py $(VENV)/.locked
	rm -rf $(VENV)/vllm-$(NEXT)
	$(BIN)/python -m pip download --disable-pip-version-check --quiet --no-deps --only-binary :all: \
	    --dest $(VENV)/wheels $(PIP_ARGS) vllm==$(NEXT)
	$(PIP) --target $(VENV)/vllm-$(NEXT) orjson
	$(BIN)/python requirements/vllm_overlay.py $(VENV)/wheels/vllm-$(NEXT)-*.whl $(VENV)/vllm-$(NEXT)
	@touch $@

check: lint types

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-dev
	$(BIN)/mypy dllm bench

# The figures in our pages are made from the CSV files that the first command writes.
bench: setup-dev
	$(BIN)/python -m bench.serve $(ARGS)
	$(BIN)/python -m bench.readme

bench-compare: setup-dev
	$(BIN)/python -m bench.compare \
	    $(or $(BASE),$(error name the commit to compare with: make bench-compare BASE=main)) $(ARGS)

# Compiles our kernels for every GPU with another Triton than the pinned one.
kernels: setup-dev
	rm -rf $(VENV)/triton
	$(PIP) --target $(VENV)/triton triton==$(or $(TRITON),$(error name the version: make kernels TRITON=3.6.0))
	PYTHONPATH=$(CURDIR)/$(VENV)/triton $(BIN)/python -m pytest tests/test_kernels.py $(ARGS)

# ARGS=--upgrade takes the newest versions that requirements/*.in allow.
lock:
	$(PYTHON) requirements/lock.py $(ARGS) $(PIP_ARGS)

$(RELEASE)/.locked: requirements/release.txt
	$(PYTHON) -m venv $(RELEASE)
	$(subst $(BIN),$(RELEASE)/bin,$(PIP)) -r requirements/release.txt
	@touch $@

# What is published: an archive of sources, and a wheel built from that; then the wheel as installed.
release: $(RELEASE)/.locked
	rm -rf dist *.egg-info
	$(RELEASE)/bin/python -m build --no-isolation
	$(RELEASE)/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv --clear $(RELEASE)/installed
	$(RELEASE)/installed/bin/python -m pip install --quiet --no-index --no-deps dist/*.whl
	cd $(RELEASE) && installed/bin/dllm --version

# As root, with debootstrap: runs the steps of Dockerfile.cpu in a new Debian, and asks a question.
container: $(RELEASE)/.locked
	$(RELEASE)/bin/hadolint packaging/Dockerfile.*
	$(PYTHON) packaging/container.py $(ARGS)

clean:
	rm -rf $(VENV) $(QUANT) $(DYNAMO) $(RELEASE) build dist *.egg-info packaging/*/build packaging/*/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
