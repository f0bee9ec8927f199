PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
JOBS ?= 2

.PHONY: demo test test-full support reference lint clean

$(VENV)/.runtime: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) -e '.[test,lint]'
	touch $@

demo: $(VENV)/.runtime
	$(BIN)/pegboard models pull smollm2-135m-instruct
	$(BIN)/pegboard generate --model smollm2-135m-instruct --chat --prompt "Count from 1 to 20." --max-tokens 64 --temperature 0

test: $(VENV)/.dev
	$(BIN)/pegboard models pull smollm2-135m-instruct
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not full"

test-full: $(VENV)/.dev
	$(BIN)/pegboard models pull smollm2-135m-instruct
	PEGBOARD_FULL=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

support: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not full" --support-table=docs/support.md

reference: $(VENV)/.dev
	$(BIN)/python tests/docs/reference.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy core plugins
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
