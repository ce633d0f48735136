# Everything here works on a fresh clone: each target first makes the environment it needs.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo check test test-all test-exhaustive device-thread coverage bench docs matrix emulated clean

setup: $(STAMP)

# --no-compile: most files of these packages are never imported, and those that are get compiled then.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no python3.11 or python3 found; set PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile torch==2.13.0
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[demo,dev,docs]'
	touch $@

demo: setup
	$(BIN)/memopt demo

check: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The made-up machine that the tests run on (tests/cpu/lib/machines.py): make test MACHINE=avx2
MACHINE ?= standard

# pytest runs last, so that its summary line ends the output.
test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --machine $(MACHINE) -m "not long and not exhaustive"

# The long ones, too: groups of processes, launchers, models of the benchmarks, and `make check`. What is landed passes them.
test-all: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --machine $(MACHINE) -m "not exhaustive"

# The others (tests/exhaustive.txt): more models, processes and compilers for what quicker tests check. A quarter of an hour.
test-exhaustive: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --machine $(MACHINE) -m exhaustive

# Every backward in a thread of its own, as on CUDA: make device-thread TESTS=tests/cpu/engine
# MEMOPT_NATIVE=0 before it: by the engine in Python.
TESTS ?= tests/cpu
device-thread: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --machine $(MACHINE) --device-thread -m "not long" $(TESTS)

# Lines and branches of the package that the tests run, in subprocesses too. The C++ of the engines is not counted.
coverage: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=term:skip-covered

bench: setup
	$(BIN)/python -m benchmarks --short

# A dead link fails.
docs: setup
	$(BIN)/mkdocs build --strict

# A smoke subset with the lowest and the newest frameworks, in environments of its own: make matrix TORCH="2.11.0 2.13.0"
TORCH ?= 2.13.0
matrix: setup
	bash tests/matrix.sh matrix $(TORCH)

# A CUDA without a card (tests/emulated/README.md): torch for CUDA in an environment of its own, 3 GB of disk, 15 minutes.
emulated:
	bash tests/emulated/run.sh .emulated

# What the other targets made; recorded runs (runs/, lightning_logs/) are yours and stay.
clean:
	rm -rf $(VENV) .emulated build dist site demo matrix *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis mutants
	rm -f .coverage .coverage.*
	find lightning_memopt examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
