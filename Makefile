# Needs python3 >= 3.10 with its venv module; everything else is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PIP = $(VENV)/bin/python -m pip
PIN = $(VENV)/torch.txt

.PHONY: demo test slow lint format docs install clean

demo: $(VENV)/ready
	$(VENV)/bin/instep run -n 2 examples/02_gpt.py

test: $(VENV)/ready-test
	$(VENV)/bin/python -m pytest

slow: $(VENV)/ready-test
	$(VENV)/bin/python -m pytest -m slow

lint: $(VENV)/ready-lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format: $(VENV)/ready-lint
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(VENV)/ready-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

install: $(VENV)/ready

# torch comes first and alone: what a machine has or was told to use (a CPU build, one CUDA version) is then pinned, so
# that no later install replaces it.
$(PIN):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "instep needs Python 3.10 or newer, this is " + sys.version.split()[0])'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "$(TORCH)"
	$(VENV)/bin/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > $@.partial
	mv $@.partial $@

$(VENV)/ready: pyproject.toml $(PIN)
	$(PIP) install --quiet --constraint $(PIN) --editable .
	touch $@

$(VENV)/ready-test: pyproject.toml $(PIN)
	$(PIP) install --quiet --constraint $(PIN) --editable ".[test]"
	touch $@ $(VENV)/ready

$(VENV)/ready-lint: pyproject.toml $(VENV)/ready-test
	$(PIP) install --quiet --constraint $(PIN) --editable ".[dev]"
	touch $@

$(VENV)/ready-docs: pyproject.toml $(PIN)
	$(PIP) install --quiet --constraint $(PIN) --editable ".[docs]"
	touch $@

clean:
	rm -rf build dist site src/*.egg-info .pytest_cache .ruff_cache
