# Everything here works on a fresh clone: each target first makes the environment it needs.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo check test test-all coverage bench docs matrix emulated clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no python3.11 or python3 found; set PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install -c constraints.txt -e '.[demo,dev,docs]'
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
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --machine $(MACHINE) -m "not long"

# The long ones, too: groups of processes, launchers, models of the benchmarks. What is landed passes them.
test-all: check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --machine $(MACHINE)

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
EMULATED := .emulated
ON_EMULATED := LD_LIBRARY_PATH=$(EMULATED)/lib OMP_NUM_THREADS=1 MEMOPT_CACHE=0 $(EMULATED)/venv/bin/python -m
emulated: $(EMULATED)/installed
	$(EMULATED)/venv/bin/python -m tests.emulated.build $(EMULATED)/lib
	$(ON_EMULATED) tests.emulated.reserved
	EMULATED_MODE=bits EMULATED_RACES=1 $(ON_EMULATED) pytest -p tests.emulated.plugin tests/emulated tests/gpu
	EMULATED_MODE=bytes $(ON_EMULATED) pytest -p tests.emulated.plugin tests/emulated tests/gpu

# torch's own requirements, NVIDIA's libraries among them, are not asked for: the pinned ones are enough.
$(EMULATED)/installed: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(EMULATED)/venv
	grep -v '^torch==' constraints.txt > $(EMULATED)/constraints.txt
	$(EMULATED)/venv/bin/python -m pip install --no-deps -r $(EMULATED)/constraints.txt torch==2.14.1
	$(EMULATED)/venv/bin/python -m pip install --no-deps -e .
	touch $@

# What the other targets made; recorded runs (runs/, lightning_logs/) are yours and stay.
clean:
	rm -rf $(VENV) $(EMULATED) build dist site demo matrix *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis mutants
	rm -f .coverage .coverage.*
	find lightning_memopt examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
