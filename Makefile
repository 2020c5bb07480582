# `make help` lists the targets. Each sets up what it needs in .venv; nothing is installed outside it.
#
#   PYTHON=/path/to/python   the interpreter to build .venv from (default: the first that fits)
#   NO_VENV=1                no .venv at all: run $(PYTHON) (default python3) with what it has
#   PEAGLE_VLLM_PYTHON=FILE  the python of an environment that has vLLM, in place of .venv-vllm
#   WORKERS=3                test processes; PYTEST_ARGS, DEMO_ARGS: passed on
#   SUITE=touched            let test run those of test-repo too whose files the change touches
#   MODEL=smollm2            model of the demo
#   PEAGLE_GEMMA=1           let test-models fetch Gemma too, whose terms you then accept

VENV := .venv
WORKERS ?= 3
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs
SETUP := PYTHON="$(PYTHON)" tools/setup_venv.sh
SETUP_INPUTS := pyproject.toml constraints.txt tools/setup_venv.sh
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
SYSTEM_PYTHON := PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(or $(PYTHON),python3)

# Machines with a card often have torch installed but no network: then test-gpu needs no .venv.
ifeq ($(NO_VENV)$(wildcard $(DEV_STAMP)),)
ifneq ($(filter test-gpu,$(MAKECMDGOALS)),)
NO_VENV := $(shell $(SYSTEM_PYTHON) -c 'import pytest, torch, transformers; \
	print(int(torch.cuda.is_available()))' 2>/dev/null)
endif
endif

ifeq ($(NO_VENV),1)
PY := $(SYSTEM_PYTHON)
PEAGLE := $(PY) -c 'from peagle.cli.main import main; main()'
RUN_ENV :=
DEV_ENV :=
DOCS_ENV :=
else
PY := $(VENV)/bin/python
PEAGLE := $(VENV)/bin/peagle
RUN_ENV := $(RUN_STAMP)
DEV_ENV := $(DEV_STAMP)
DOCS_ENV := $(DOCS_STAMP)
endif

# setup_venv.sh leaves compiling to the first import. Where the environment forbids Python to keep
# what it compiled, each of the many processes would compile everything it imports anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-repo test-gpu test-vllm test-models lint style types format docs dist smoke clean distclean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(RUN_ENV) ## Run the demo on the bundled pair, or on a chat model with MODEL=smollm2
	@$(PEAGLE) demo $(MODEL) $(DEMO_ARGS)

# One thread per process: the workers would otherwise fight for the same cores. Each begins with an
# equal run of files, so that what the tests of a file share is made once. Without a Chromium the tests
# of web pages are skipped, and say so.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal --durations=10
SUITE := main

test: $(DEV_ENV) ## Run the tests of the package that need no GPU
	@test $(SUITE) = main || tools/setup_browser.sh $(PY) || test -z "$$PEAGLE_REQUIRE_BROWSER"
	$(PYTEST) --suite $(SUITE) $(PYTEST_ARGS)

test-quick: $(DEV_ENV) ## Run the quick ones of them: no server, nothing slow
	$(PYTEST) --suite quick $(PYTEST_ARGS)

test-repo: $(DEV_ENV) ## Run documents, recipes, benchmarks, browsers, containers, a release, Kubernetes, Grafana
	@tools/setup_browser.sh $(PY) || test -z "$$PEAGLE_REQUIRE_BROWSER"
	$(PYTEST) --suite repo $(PYTEST_ARGS)

test-gpu: $(DEV_ENV) ## Run the tests that need an NVIDIA card
	$(PY) -m pytest -m gpu $(PYTEST_ARGS)

ifeq ($(PEAGLE_VLLM_PYTHON),)
test-vllm: PEAGLE_VLLM_PYTHON := $(VLLM_VENV)/bin/python
test-vllm: $(VLLM_STAMP)
endif
test-vllm: $(DEV_ENV) ## Hold our heads against real vLLM, installed in .venv-vllm (3.5 GB)
	OMP_NUM_THREADS=1 PEAGLE_VLLM_PYTHON=$(PEAGLE_VLLM_PYTHON) \
		$(PY) -m pytest -m vllm --durations=10 -o faulthandler_timeout=3600 tests/interop $(PYTEST_ARGS)

test-models: $(DEV_ENV) ## Hold real models, which are fetched, against transformers
	$(PY) -m pytest -m models --durations=10 -o faulthandler_timeout=3600 tests/real_models $(PYTEST_ARGS)

lint: style types ## Check style, formatting and types

style: $(DEV_ENV) ## Check style and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(DEV_ENV) ## Check types
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PY) -m pyright

format: $(DEV_ENV) ## Apply the formatter and the safe fixes
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Not --quiet, which hides the warnings from --strict.
docs: $(DOCS_ENV) ## Build the documentation site in build/site; a broken link or a missing page fails
	$(PY) tools/docs_site.py build/pages
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

dist: $(DEV_ENV) ## Build wheel, sdist, bill of materials and hashes in dist/, checked
	rm -rf dist
	$(PY) -m build --no-isolation
	$(PY) -m twine check --strict dist/*
	$(PY) tools/check_dist.py dist
	$(PY) tools/describe_dist.py dist

smoke: dist ## Install the wheel into a new environment outside the checkout and run the demo there
	tools/smoke_wheel.sh dist/*.whl

clean: ## Remove build results and caches
	rm -rf dist build .pytest_cache .ruff_cache .hypothesis .coverage htmlcov
	find src tests tools examples recipes -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## Also remove .venv and .venv-vllm
	rm -rf $(VENV) $(VLLM_VENV)

$(RUN_STAMP): $(SETUP_INPUTS)
	@$(SETUP) $(VENV) -e '.[serve,grammar,report,gguf]'
	@touch $@

$(DEV_STAMP): $(SETUP_INPUTS)
	@$(SETUP) $(VENV) -e '.[dev]'
	@touch $(RUN_STAMP) $@

$(DOCS_STAMP): $(SETUP_INPUTS)
	@$(SETUP) $(VENV) -e '.[docs]'
	@touch $@

$(VLLM_STAMP): tools/setup_vllm.sh tools/setup_venv.sh constraints.txt
	@PYTHON="$(PYTHON)" tools/setup_vllm.sh $(VLLM_VENV)
	@touch $@
