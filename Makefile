# Two commands do all the set-up: `make train` runs the main job, `make test` the tests; `make test-whole` has all cases.

PYTHON ?= python3
VENV   ?= .venv
RANKS  ?= 2
ARGS   ?=
# Processes that share the test files; a selection by ARGS runs in one.
WORKERS ?= $(if $(strip $(ARGS)),0,2)
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
DRAW    = $(BIN)/zeroshard simulate --stages 4 --microbatches 8
DRAWN   = docs/pictures/timeline

# For GPUs: an environment over the packages of PYTHON, which must have torch with CUDA; that torch stays as it is.
GPU_VENV ?= .venv-gpu
GPU_PIP   = $(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
HAS_TORCH = import sys, importlib.util as u; sys.exit(None if u.find_spec("torch") else "install torch with CUDA first")

.PHONY: train test test-whole lint types check soak verify gpu gpus docs pictures clean

train: export OMP_NUM_THREADS = 1
train: $(VENV)/.installed
	$(BIN)/zeroshard train --ranks $(RANKS) $(ARGS)

test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.tested
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder \
		--durations=30 $(ARGS)

test-whole: WORKERS = 2
test-whole: ARGS = --whole
test-whole: test

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.tested
	$(BIN)/mypy --num-workers 2

check: test lint types

soak: $(VENV)/.tested
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py $(ARGS)

verify: $(VENV)/.tested
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/verify_zoo.py $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/verify_bugs.py

gpu: $(GPU_VENV)/.installed
	$(GPU_VENV)/bin/python benchmarks/gpu/all.py $(ARGS)

gpus: $(GPU_VENV)/.installed
	$(GPU_VENV)/bin/python benchmarks/gpu/several.py $(ARGS)

docs: $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	$(BIN)/sphinx-build -W -q -b html docs docs/_build

pictures: $(VENV)/.installed
	$(BIN)/torchrun --standalone --nproc-per-node 4 docs/memory_by_stage.py docs/pictures/memory-by-stage.svg
	$(DRAW) --all --svg $(DRAWN)-all.svg
	for name in naive gpipe 1f1b zb-h1; do $(DRAW) --schedule $$name --svg $(DRAWN)-$$name.svg || exit 1; done
	for name in pipedream 2bw; do $(DRAW) --schedule $$name --steps 3 --svg $(DRAWN)-$$name.svg || exit 1; done
	$(DRAW) --schedule interleaved --virtual-stages 2 --svg $(DRAWN)-interleaved.svg

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(PIP) --editable '.[dev,hf,peft,quantized,tensorboard,lightning,trl,data,diffusers]'
	touch $@

$(GPU_VENV)/.installed: pyproject.toml
	$(PYTHON) -c '$(HAS_TORCH)'
	$(PYTHON) -m venv $(GPU_VENV)
	$(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(echo $(GPU_VENV)/lib/python*/site-packages)/below.pth"
	$(PYTHON) -c 'import torch; print("torch==" + torch.__version__)' > $(GPU_VENV)/torch.txt
	$(GPU_PIP) --constraint $(GPU_VENV)/torch.txt --editable '.[hf]' pytest pytest-xdist hypothesis
	touch $@

clean:
	rm -rf $(VENV) $(GPU_VENV) build docs/_build src/*.egg-info
