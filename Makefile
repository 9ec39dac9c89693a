# The commands of the README. A virtual environment is made in .venv; set PYTHON to choose the interpreter,
# VENV to use another folder. Everything is installed at the versions of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_DIR ?= demo-output

.PHONY: demo test check slurm soak docs clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

## make demo    set up, then the whole job on drawn screenshots: cache, train, eval, predict, report
demo: $(VENV)/.installed
	$(BIN)/pipeline demo --output $(DEMO_DIR)

## make test    set up (SLURM too, as root where apt-get is), then the checks and the tests
test: check slurm
	$(BIN)/pytest -n 2 --dist worksteal -m "not soak"

## make check   ruff, mypy, import-linter
check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

## make slurm   install SLURM for the tests on a real cluster, as root where apt-get is
slurm:
	@sh tests/slurm/install.sh

## make soak    the tests that take longer
soak: $(VENV)/.installed slurm
	$(BIN)/pytest -n 2 -m "soak and not alone"
	$(BIN)/pytest -m alone

## make docs    write docs/configuration.md from the docstrings of the settings
docs: $(VENV)/.installed
	$(BIN)/python -m pipeline.configuration_docs > docs/configuration.md

clean:
	rm -rf $(VENV) $(DEMO_DIR) .pytest_cache .mypy_cache .ruff_cache
