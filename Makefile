# Two commands do all the set-up: `make train` runs the main job, `make test` the whole test suite.

PYTHON ?= python3
VENV   ?= .venv
RANKS  ?= 2
ARGS   ?=
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test lint types check docs clean

train: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m zeroshard train $(ARGS)

test: $(VENV)/.tested
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.tested
	$(BIN)/mypy

check: test lint types

docs: $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	$(BIN)/sphinx-build -W -q -b html docs docs/_build

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(PIP) --editable '.[dev,hf,tensorboard]'
	touch $@

clean:
	rm -rf $(VENV) build docs/_build src/*.egg-info
