# Each target does its own set-up in .venv; `make` alone lists them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

DEMO_MODEL ?= smollm2-135m-instruct
LAB_ARGS   ?=
# test processes side by side; each runs torch on one thread
WORKERS    ?= 2
NSYS_STATS := $(CURDIR)/.cache/nsys/usr/lib/x86_64-linux-gnu/nsight-systems/target-linux-x64/nsys
PYTEST     := OMP_NUM_THREADS=1 MRV2_NSYS_STATS=$$(ls "$(NSYS_STATS)" 2>/dev/null) $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo lab browser oracle test test-slow test-gpu check lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.core ## serve a small model with both runners, sync and async, and compare
	$(BIN)/mrv2 compare --model $(DEMO_MODEL)

lab: $(VENV)/.notebook ## open JupyterLab on the quickstart
	$(BIN)/mrv2 lab $(LAB_ARGS)

# the group that needs the cores to itself may be empty, which pytest reports as exit status 5
test: lint browser oracle ## every check, then every test that needs no GPU
	$(PYTEST) -q -m "serial and not gpu and not slow" || [ $$? -eq 5 ]
	$(PYTEST) -q -m "not serial and not gpu and not slow" -n $(WORKERS) --dist loadfile

# the tests of pages need a browser: Debian's, where it is missing and may be installed; elsewhere they skip
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium >/dev/null; } \
	  || echo "no Chromium here: the browser tests will be skipped" >&2

# NVIDIA's statistics scripts, to check our figures against: unpacked in CI, elsewhere those tests skip
oracle:
	@[ "$$CI" != true ] || [ -x "$(NSYS_STATS)" ] || scripts/install_nsys_stats.sh >/dev/null \
	  || echo "no nsys stats: the tests against it will be skipped" >&2

test-slow: $(VENV)/.test ## the tests left out of `make test` for their length
	$(PYTEST) -q -m "slow and not gpu"

test-gpu: $(VENV)/.test ## the tests that need a CUDA device
	$(BIN)/python -m pytest -q -m gpu

check: lint ## formatting, lint, types and house rules, without the other tests
	$(PYTEST) -q tests/checks

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.test ## rewrite the sources as `make check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and every cache
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info workbench/*.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, not " \
	  + sys.version.split()[0] + "; choose one with `make PYTHON=...`")'
	$(PYTHON) -m venv $(VENV)

# a stamp for each set of extras, renewed when pyproject.toml changes
$(VENV)/.core: pyproject.toml | $(BIN)/python
	$(PIP) install -e .
	@touch $@

$(VENV)/.test $(VENV)/.notebook: $(VENV)/.%: pyproject.toml | $(BIN)/python
	$(PIP) install -e '.[$*]'
	@touch $@
