# One command per habit. Every target sets up what it needs in .venv; nothing else has to be installed first.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
# One spinning OpenMP thread too many costs more than it gives on a shared machine.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test test-slow test-machines test-real fuzz check quick lint bench bench-history results clean

demo: $(VENV)/.bench
	OMP_NUM_THREADS=1 $(BIN)/tcil run

PYTEST := $(BIN)/python -m pytest -n auto --dist loadgroup -q

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PYTEST)

# What takes long: all of the paper's artifacts on digits, clusters that are taken apart.
test-slow: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PYTEST) -m slow

# The suite once for each factor in which machines differ, one factor at a time; FACTORS="avx2 order" for some of them.
test-machines: $(VENV)/.dev
	$(BIN)/python tests/machines.py $(FACTORS)

# Lint, types and every test that starts no process, trains nothing and needs no Ray: for every save.
check: $(VENV)/.dev
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint quick

quick: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PYTEST) -m "not (real or slow or processes or training or ray)"

# Needs CIFAR-100 and the authors' checkpoints; TCIL_DATA names the folder that holds them.
test-real: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m real --durations=10 tests

# 20,000 random and hostile inputs, fresh ones every time; counts in docs/results/fuzz.json. Goes on where it stopped.
fuzz: $(VENV)/.dev
	$(BIN)/python benchmarks/fuzz.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive src

# Ratios side by side, kept per commit under docs/results/bench; TCIL_DATA=DIR for the authors' checkpoint.
bench: $(VENV)/.dev
	$(BIN)/python benchmarks/bench.py

# The last of those tables beside each other.
bench-history: $(VENV)/.dev
	$(BIN)/python benchmarks/bench.py --history 5

# docs/results.md from the JSON files under docs/results; trains nothing.
results: $(VENV)/.bench
	$(BIN)/python benchmarks/results.py

# Every install goes through constraints.txt: an unpinned torch pulls gigabytes of CUDA packages.
$(VENV)/.bench: pyproject.toml constraints.txt
	@$(PYTHON) --version >/dev/null 2>&1 || { echo "make: '$(PYTHON)' not found: install Python 3.11 or newer, or say e.g. make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[bench]"
	@touch $@

$(VENV)/.dev: $(VENV)/.bench
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
