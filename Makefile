# make demo | test | test-all | check | gpu-check. Each creates $(VENV) when needed.
#   PYTHON=...  the Python (>= 3.12) that creates the environment; found by itself otherwise (scripts/find_python.sh)
#   EXTRA=...   accelerator extra: cuda13 on an NVIDIA machine, none otherwise; `EXTRA=` for none, `EXTRA=cuda12` for CUDA 12
#   JOBS=...    test processes, 2 by default
#   PY=...      use this interpreter as it is and install nothing (it must have the dependencies already)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
# Test processes: most of the suite's time is XLA compiling, one core each.
JOBS ?= 2
PYTHON ?=
EXTRA ?= auto
export PYTHON EXTRA

ifdef PY
RUN_ENV :=
DEV_ENV :=
else
PY := $(VENV)/bin/python
RUN_ENV := $(VENV)/.installed-run
DEV_ENV := $(VENV)/.installed-dev
endif

.PHONY: help demo test test-all check format gpu-stamp gpu-check clean

help:
	@echo "make demo       install, then show prefix reuse on SmolLM2-135M (CPU or GPU)"
	@echo "make test       the test suite (CPU, a few minutes)"
	@echo "make test-all   with the slow tests"
	@echo "make check      ruff, ruff format --check, pyright"
	@echo "make format     let ruff rewrite what it can"
	@echo "make gpu-check  the GPU tests, on a clean commit and an idle card"
	@echo "make gpu-stamp  write .gpu-stamp.json, for a GPU machine that gets the files without git"

demo: $(RUN_ENV)
	@$(PY) -m prefix_reuse.cli demo $(DEMO_ARGS)

test: $(DEV_ENV)
	@$(PY) -m pytest -n $(JOBS) --dist loadfile $(TEST_ARGS)

test-all: $(DEV_ENV)
	@$(PY) -m pytest -m "not gpu" $(TEST_ARGS)

check: $(DEV_ENV)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m pyright --pythonpath "$$(command -v $(PY))"

format: $(DEV_ENV)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

gpu-stamp: $(DEV_ENV)
	@$(PY) scripts/gpu_check.py stamp

gpu-check: $(DEV_ENV)
	@$(PY) scripts/gpu_check.py run

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis *.egg-info

# The development set contains the run-time set, so that one make_venv call serves both stamps.
$(VENV)/.installed-run: pyproject.toml scripts/make_venv.sh scripts/find_python.sh
	@scripts/make_venv.sh "$(VENV)" run

$(VENV)/.installed-dev: pyproject.toml scripts/make_venv.sh scripts/find_python.sh
	@scripts/make_venv.sh "$(VENV)" dev
