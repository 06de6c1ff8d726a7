# install  .venv with the package and its development tools      demo   the demo model over two ranks
# test     the fast suite, two tests at a time                    check  formatting, lint, types, floors
# slow     what takes minutes a test: kills, floods, soaks        full   everything, the whole grids too
# bench    measurements
# soak     twenty minutes of mixed, ill-behaved traffic           flood  500 connections against a queue of 64
# families docs/families.md anew: every family on real ranks (needs an idle machine)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
MARK := $(VENV)/.installed
SOAK_MINUTES ?= 20

.PHONY: install demo test slow check full soak flood families bench clean

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("shoal needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# torch goes first and pinned, so that nothing else's open range picks another build.
$(MARK)-runtime: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing shoal and what it runs on into $(VENV) (the first time takes minutes)"
	$(PIP) torch
	$(PIP) --editable .
	@touch $@

$(MARK)-dev: $(MARK)-runtime
	@echo "installing the development tools"
	$(PIP) --editable '.[dev]'
	@touch $@

install: $(MARK)-dev

demo: $(MARK)-runtime
	$(BIN)/python examples/demo.py

test: $(MARK)-dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not full and not gpu"

slow: $(MARK)-dev
	$(BIN)/python -m pytest -m "slow and not full and not gpu"

full: $(MARK)-dev
	$(BIN)/python -m pytest -m "not gpu"

soak: $(MARK)-dev
	PYTHONPATH=tests $(BIN)/python -m chaos.soak demo -tp 2 --minutes $(SOAK_MINUTES)

flood: $(MARK)-dev
	PYTHONPATH=tests $(BIN)/python -m chaos.flood demo -tp 2

families: $(MARK)-dev
	PYTHONPATH=tests $(BIN)/python -m support.families_table --output docs/families.md

check: $(MARK)-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(MARK)-dev
	$(BIN)/python -m shoal bench offline demo --scale ci -tp 1,2

clean:
	rm -rf $(VENV)
