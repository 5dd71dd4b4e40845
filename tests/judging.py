"""Judging one call by the float64 reference, for the tests that choose their inputs themselves."""

from __future__ import annotations

import torch

from fusedops import catalog
from fusedops.catalog import check


def randn(*shape, seed=0, device="cpu", dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def judge(entry, operator, tolerance=4e-7, gradient_tolerance=None, grad_output=None, natural=None, **arguments):
    """Output and gradients within a relative error of the reference's, inputs and incoming gradient left alone.

    ``natural`` is an argument's gradient's size where its terms do not cancel, if it is not its output's share of it.
    """
    entry = catalog.get(entry)
    described = next(one for one in entry.operators if one.name == operator)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    before = {name: value.clone() for name, value in tensors.items()}
    inputs = {name: value for name, value in tensors.items() if value.is_floating_point()}
    for value in inputs.values():
        value.requires_grad_()
    output = entry.load("op", operator)(**arguments)
    dy = torch.ones_like(output) if grad_output is None else grad_output
    dy_before = dy.clone()
    gradients = dict(zip(inputs, torch.autograd.grad(output, list(inputs.values()), dy), strict=True))

    assert output.is_contiguous()
    assert all(torch.equal(tensors[name], value) for name, value in before.items())
    assert torch.equal(dy, dy_before)
    values = {name: check.to_numpy(value) for name, value in arguments.items()}
    expected = described.reference(**values)
    assert check.error(output, expected) <= tolerance
    for name, gradient in described.backward(check.to_numpy(dy), **values).items():
        size = check.root_mean_square(check.to_numpy(dy)) * check.root_mean_square(expected)
        scale = natural if name == "input" and natural else size / (check.root_mean_square(values[name]) or 1.0)
        assert gradients[name].dtype == tensors[name].dtype
        error = check.error(gradients[name], gradient, scale)
        assert error <= (gradient_tolerance or 4 * tolerance), (name, error)
    return output, gradients


STRIDED = {
    "expanded scalar": lambda device: torch.ones((), device=device).expand(2, 5, 24),
    "expanded row": lambda device: randn(1, 1, 24, seed=2, device=device).expand(2, 5, 24),
    "columns": lambda device: randn(24, 5, 2, seed=3, device=device).permute(2, 1, 0),
    "every second": lambda device: randn(2, 5, 48, seed=4, device=device)[..., ::2],
    "slice of fused qkv": lambda device: randn(2, 5, 72, seed=5, device=device)[..., 24:48],
    "transposed rows": lambda device: randn(5, 2, 24, seed=6, device=device).transpose(0, 1),
}
