# make serve    a server with sparse decode, on this host's GPU or CPU; Ctrl-C stops it
# make test     all tests
# make test-all-sglang   the tests of servers and patches on the other SGLang releases, see docs/compatibility.md
# make soak     thousands of mixed requests against one small server, checked after each round; see docs/robustness.md
# make lint     style and types
# make clean    removes what the others made here; the sample model stays in its cache

# Folder of the virtual environment; "none" uses the packages of PYTHON as they are and installs nothing.
VENV ?= .venv
# Interpreter that makes the environment, or, with VENV=none, that runs everything.
PYTHON ?= python3
PORT ?= 30000
# Model folder; by default the sample model is fetched.
MODEL ?=
# More flags for sglang.launch_server.
EXTRA_ARGS ?=
PYTEST_ARGS ?=
# Test files that run side by side; auto: two at most, and one on a host with a GPU.
WORKERS ?= auto
# For test-all-sglang: some of its releases, such as 0.5.23; by default all.
RELEASES ?=
# For soak: how many requests, the time limit in minutes, what kind of server (resident, offloaded, split), the length of
# prompts (short, long), the seed that a failure printed, the round to begin with, and a file for the counts.
SOAK_REQUESTS ?= 10000
SOAK_MINUTES ?= 120
SOAK_MODE ?= resident
SOAK_SCALE ?= short
SOAK_SEED ?=
SOAK_FIRST_ROUND ?= 0
SOAK_JSON ?= build/soak.json

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory

ifeq ($(VENV),none)
PREPARE = site=$$("$(PYTHON)" scripts/local_site.py); export PYTHONPATH="$$site$${PYTHONPATH:+:$$PYTHONPATH}"
RUN = "$(PYTHON)"
else
PREPARE = "$(PYTHON)" scripts/setup_venv.py "$(VENV)"
RUN = "$(abspath $(VENV))/bin/python"
endif

.PHONY: serve test test-all-sglang soak lint clean venv

serve:
	@$(PREPARE); exec $(RUN) scripts/serve.py --port "$(PORT)" --model "$(MODEL)" -- $(EXTRA_ARGS)

test:
	@$(PREPARE); exec $(RUN) -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-all-sglang:
	@$(PREPARE); exec $(RUN) scripts/test_all_sglang.py $(addprefix --release=,$(RELEASES)) -- -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

soak:
	@$(PREPARE); mkdir -p "$(dir $(SOAK_JSON))"; exec $(RUN) tests/soak/soak_run.py --requests "$(SOAK_REQUESTS)" \
		--minutes "$(SOAK_MINUTES)" --mode "$(SOAK_MODE)" --scale "$(SOAK_SCALE)" $(addprefix --seed=,$(SOAK_SEED)) \
		--first-round "$(SOAK_FIRST_ROUND)" --json "$(SOAK_JSON)"

lint:
	@$(PREPARE); $(RUN) -m ruff check .; $(RUN) -m ruff format --check .; $(RUN) -m mypy

venv:
	@$(PREPARE)

clean:
	rm -rf .venv build .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
