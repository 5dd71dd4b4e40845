"""A kernel is added by adding a folder: the harness, the compiler and the command line find it with no other edit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TOY = {
    "__init__.py": """
from fusedops.catalog import Array, Entry, Kernel, Operator

from .reference import toy_scale, toy_scale_backward

ENTRY = Entry(
    name="toy_scale",
    summary="A number times a tensor",
    source="arithmetic",
    dtypes=("float32", "float16"),
    limits="any shape",
    operators=(
        Operator(
            name="toy_scale",
            reference=toy_scale,
            backward=toy_scale_backward,
            sample=lambda draw: {"input": Array((draw.integer(0, 9), draw.integer(1, 99)), grad=True), "factor": 3.0},
            shapes={"4096": {"input": Array((4096,), grad=True), "factor": 3.0}},
            registers=("toy_scale",),
        ),
    ),
    kernels={
        "toy_scale": Kernel(
            "kernel:scale", {"x_ptr": "*{dtype}", "y_ptr": "*{dtype}", "size": "i32", "factor": "fp32"}
        )
    },
)
""",
    "reference.py": """
def toy_scale(input, factor):
    return factor * input


def toy_scale_backward(grad_output, input, factor):
    return {"input": factor * grad_output}
""",
    "kernel.py": """
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, y_ptr, size, factor, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offset, offset < size).to(tl.float32)
    tl.store(y_ptr + offset, (x * factor).to(y_ptr.dtype.element_ty), offset < size)
""",
    "op.py": '''
import torch

from fusedops import runtime

from . import ENTRY


def toy_scale(input: torch.Tensor, factor: float) -> torch.Tensor:
    """factor · input."""
    return _op(input, factor)


def _forward(input, factor):
    if not runtime.use_kernel("toy_scale", input.device):
        return input.new_empty(input.shape).copy_(input * factor)
    from . import kernel

    x, y = input.contiguous(), input.new_empty(input.shape)
    config = ENTRY.configs.lookup("toy_scale", runtime.facts(x.device), str(x.dtype)[6:])
    runtime.launch(kernel.scale, (-(-x.numel() // config["BLOCK"]),), x.device, x, y, x.numel(), factor, **config)
    return y


def _setup_context(ctx, inputs, output):
    ctx.factor = inputs[1]


_op = runtime.register(
    "toy_scale(Tensor input, float factor) -> Tensor",
    _forward,
    lambda input, factor: input.new_empty(input.shape),
    setup_context=_setup_context,
    backward=lambda ctx, grad: (_op(grad, ctx.factor), None),
)
''',
    "configs.json": """
{"rows": [
  {"kernel": "toy_scale", "arch": "any", "config": {"BLOCK": 256, "num_warps": 4}}
]}
""",
}


class Checkout:
    """A copy of the repository with the toy in its kernels/; the tests lie apart, so that conftest.py, which takes
    their root off the import path, leaves the copy on it.
    """

    def __init__(self, folder: Path, factor: str) -> None:
        ignore = shutil.ignore_patterns("__pycache__")
        self.code, self.tests = folder / "code", folder / "apart" / "tests"
        for name in ("fusedops", "kernels"):
            shutil.copytree(ROOT / name, self.code / name, ignore=ignore)
        self.tests.mkdir(parents=True)
        for name in ("conftest.py", "test_catalog.py", "test_compile.py"):
            shutil.copy(ROOT / "tests" / name, self.tests)
        for place in (self.code, self.tests.parent):
            shutil.copy(ROOT / "pyproject.toml", place)
        toy = self.code / "kernels" / "toy_scale"
        toy.mkdir()
        for name, text in TOY.items():
            (toy / name).write_text(text.lstrip().replace("* factor)", f"* {factor})"))

    def run(self, *args, interpret=False):
        ours = {"PYTHONPATH": str(self.code), "TRITON_INTERPRET": "1" if interpret else "0", "COLUMNS": "140"}
        env = {**os.environ, **ours}
        return subprocess.run(
            [sys.executable, *args],
            cwd=self.tests,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pytest(self, file, select, **how):
        return self.run("-m", "pytest", "-p", "no:cacheprovider", "-q", file, "-k", select, **how)

    def fusedops(self, *args, **how):
        return self.run("-c", "from fusedops.cli import main; main()", *args, **how)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("right"), factor="factor")


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    return Checkout(tmp_path_factory.mktemp("wrong"), factor="factor * 1.01")


@pytest.mark.parametrize("interpret", [False, True])
def test_the_harness_runs_a_new_folder(checkout, interpret):
    pytest.importorskip("triton")
    done = checkout.pytest("test_catalog.py", "toy", interpret=interpret)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_the_compiler_takes_a_new_folder(checkout):
    pytest.importorskip("triton")
    done = checkout.pytest("test_compile.py", "toy_scale and sm_90")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_the_command_line_lists_and_verifies_a_new_folder(checkout):
    assert "A number times a tensor" in checkout.fusedops("list").stdout
    done = checkout.fusedops("verify", "toy_scale", "--seeds", "2")
    assert done.returncode == 0, done.stdout
    assert "2 of 2 within tolerance" in done.stdout


def test_a_wrong_kernel_fails_the_harness_and_verify(broken):
    done = broken.pytest("test_catalog.py", "toy and matches")
    assert done.returncode == 1, done.stdout
    assert "test_operator_matches_the_reference[toy_scale]" in done.stdout
    pytest.importorskip("triton")
    done = broken.fusedops("verify", "toy_scale", "--seeds", "2", interpret=True)
    assert done.returncode == 1, done.stdout
    assert "kernel" in done.stdout
    assert "FAILED" in done.stdout
