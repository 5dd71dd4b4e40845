"""Every operator of the catalogue at its real sizes, against what a PyTorch user would write, forward and backward.

    make bench      (needs a GPU)

A round is one call from an empty L2 to a finished GPU, host time included: the time a user waits.
"""

from __future__ import annotations

import pytest
import torch

from fusedops import catalog
from fusedops.catalog import check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="speed is measured on a GPU")

CASES = [
    pytest.param(entry, operator, shape, direction, side, id=f"{operator.name} {shape} {direction}-{side}")
    for entry in catalog.entries()
    for operator in entry.operators
    for shape in operator.shapes
    for direction in (("forward", "backward") if operator.backward else ("forward",))
    for side in ("fusedops", "eager")
    if side == "fusedops" or operator.eager
]


@pytest.mark.parametrize(("entry", "operator", "shape", "direction", "side"), CASES)
def test_speed(benchmark, entry, operator, shape, direction, side):
    dtype = torch.bfloat16 if "bfloat16" in entry.dtypes else getattr(torch, entry.dtypes[0])
    arguments = check.materialize(operator.shapes[shape], dtype, "cuda", seed=0)
    function = entry.load("op", operator.name if side == "fusedops" else operator.eager)
    backward = direction == "backward"
    with torch.set_grad_enabled(backward):
        output = function(**arguments)
    if backward:
        wanted = [v for v in arguments.values() if isinstance(v, torch.Tensor) and v.requires_grad]
        grad = torch.randn_like(output)
    l2 = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")

    def run():
        with torch.set_grad_enabled(backward):
            if backward:
                torch.autograd.grad(output, wanted, grad, retain_graph=True)
            else:
                function(**arguments)
        torch.cuda.synchronize()

    def clear_l2():
        l2.zero_()
        torch.cuda.synchronize()

    benchmark.group = f"{operator.name} {shape} {direction}"
    benchmark.extra_info.update(dtype=str(dtype), gpu=torch.cuda.get_device_name())
    benchmark.pedantic(run, setup=clear_l2, rounds=30, warmup_rounds=3)
