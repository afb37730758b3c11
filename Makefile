# make explore | lab | test | bench | setup | lint | recordings | clean
#
# PIP_ARGS      goes to pip: another index, a proxy, a folder of wheels
# NPM_ARGS      goes to npm, which `lint` and `test` ask for prettier, eslint and typescript where node is there
# EXPLORE_ARGS  goes to `cbviz explore`   (make explore EXPLORE_ARGS="--scenario burst --port 18866")
# LAB_ARGS, BENCH_ARGS  likewise
# TEST_ARGS     goes to pytest            (make test TEST_ARGS="tests/core -x")
# TEST_JOBS     test processes; tests that load the model or drive a browser share one of them, so that they never run side by side
# PYTHON        the interpreter that .venv is made from

PYTHON ?= python3
PIP_ARGS ?=
EXPLORE_ARGS ?=
LAB_ARGS ?=
BENCH_ARGS ?=
TEST_ARGS ?=
TEST_JOBS ?= 1
export NPM_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(PIP_ARGS) -c constraints.txt

.PHONY: explore lab test bench setup lint pin recordings clean
.DEFAULT_GOAL := explore

explore: $(VENV)/.installed
	@$(BIN)/cbviz model pull
	@$(BIN)/cbviz explore $(EXPLORE_ARGS)

lab: $(VENV)/.installed
	@$(BIN)/cbviz model pull
	@$(BIN)/cbviz lab $(LAB_ARGS)

bench: $(VENV)/.installed-dev
	@$(BIN)/cbviz model pull
	@$(BIN)/cbviz bench $(BENCH_ARGS)

setup: $(VENV)/.installed-dev

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@.ci/javascript

# One process by default: figures of memory and of painted frames are read in some tests, and two cores are soon full.
test: $(VENV)/.installed-dev
	@$(BIN)/cbviz model pull
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@.ci/javascript
	@$(BIN)/python -m pytest $(if $(filter-out 1,$(TEST_JOBS)),-n $(TEST_JOBS) --dist loadgroup) $(TEST_ARGS)

# The runs of the real model that come with the package, for machines without room for torch.
recordings: $(VENV)/.installed
	@$(BIN)/cbviz model pull
	@$(BIN)/python -m cbviz.recordings.make

pin: $(VENV)/.installed-dev
	@$(BIN)/python .ci/pin.py

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(f"cbviz needs Python 3.10 or later, this is {sys.version.split()[0]}; choose another with make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)

# A stamp is older than what it was made from exactly when the packages have to be looked at again.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[dev]"
	@touch $(VENV)/.installed $@
