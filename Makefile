# make run    install, then pre-train, meta-learn and test a learner on the embedded data (about 4 minutes on 2 cores)
# make test   install, then run the whole test suite
# make lint   formatting, lint and types

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: run test lint clean

run: $(INSTALLED)
	$(BIN)/npbml run --baselines npbml-any maml prototypes

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
