# The project's own commands.  Further arguments go into ARGS: `make test ARGS="tests/test_sse.py -x"`.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: demo test test-e2e check bench bench-trim venv

# A six-turn chat against a real vLLM, straight and through the proxy (ARGS=--once ends after the table).
demo: venv
	$(BIN)/prefix-proxy demo $(ARGS)

# The linters and every test that needs no real vLLM.
test: check
	$(BIN)/python -m pytest $(ARGS)

# The tests against a real vLLM on the CPU; made in a cache folder the first time.
test-e2e: venv
	$(BIN)/python -m pytest -m e2e $(ARGS)

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

# Direct, one bare aiohttp hop, and the proxy, side by side against the fake vLLM.
bench: venv
	$(BIN)/python -m tests.bench_relay $(ARGS)

# What trimming leaves of the prefix cache: a simulated chat of 400 turns, and a real vLLM with a small context.
bench-trim: venv
	$(BIN)/python -m tests.bench_trim $(ARGS)

venv: .venv/ready

# Made again only when pyproject.toml changed.
.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv || { echo "The venv module is needed: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@
