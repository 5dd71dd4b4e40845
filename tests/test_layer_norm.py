"""layer_norm: the kinds of fault that users report, judged by the float64 reference."""

from __future__ import annotations

import functools
import math

import judging
import pytest
import torch
from judging import STRIDED, randn

from fusedops import runtime
from fusedops.catalog.layer_norm.op import layer_norm

pytestmark = pytest.mark.usefixtures("poisoned")
judge = functools.partial(judging.judge, "layer_norm", "layer_norm")


def affine(width, device):
    return {"weight": randn(width, seed=1, device=device), "bias": randn(width, seed=2, device=device)}


@pytest.mark.parametrize("width", [40, 1000, 9000])
@pytest.mark.parametrize("mean", [30.0, 1e4, -1e6])
def test_a_big_mean_costs_neither_output_nor_gradient_anything(mean, width, device):
    x = randn(3, width, device=device) + mean
    grad_output = randn(3, width, seed=3, device=device)
    judge(input=x, grad_output=grad_output, natural=1.0, **affine(width, device))


@pytest.mark.parametrize("width", [1, 2, 7, 300, 1000, 9001])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e6 + 0.1, -1e30, 1.7e-30, 1 / 3])
def test_a_constant_row_is_exactly_the_bias(value, width, device):
    bias = randn(width, seed=2, device=device)
    x = torch.full((2, width), value, device=device)
    assert torch.equal(layer_norm(x, None, bias), bias.expand(2, width))
    assert torch.equal(layer_norm(x, randn(width, device=device)).abs(), torch.zeros_like(x))


def test_width_1_has_no_gradient_but_the_bias(device):
    x, weight, bias = (randn(*s, device=device).requires_grad_() for s in [(50, 1), (1,), (1,)])
    layer_norm(x, weight, bias).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.equal(bias.grad, torch.full_like(bias, 50))


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-18, 1e18, 1e30, 3e37])
@pytest.mark.parametrize("width", [5, 9000])
def test_values_whose_squares_leave_float32(size, width, device):
    x = (randn(2, width, device=device) + 1) * size
    judge(input=x, grad_output=randn(2, width, seed=3, device=device), **affine(width, device))


def test_tiny_values_with_no_eps(device):
    x = randn(3, 40, device=device) * 1e-18
    judge(input=x, eps=0.0, grad_output=randn(3, 40, seed=3, device=device), natural=1e18, **affine(40, device))


def test_a_row_does_not_depend_on_its_neighbours(device):
    x = randn(4, 100, device=device)
    alone = layer_norm(x)
    x[1], x[2] = 1e6, 1e30
    assert torch.equal(layer_norm(x)[[0, 3]], alone[[0, 3]])


@pytest.mark.parametrize("rest", [0.0, 1.0, 1e30])
def test_nan_makes_its_row_nan_and_no_other(rest, device):
    x = torch.full((2, 9), rest, device=device)
    x[0, 4] = math.nan
    output = layer_norm(x)
    assert output[0].isnan().all()
    assert torch.equal(output[1], torch.zeros(9, device=device))


SHAPES = [(7,), (5, 6), (2, 3, 4), (2, 1, 3, 5), (0, 4), (3, 0), (0,), (1, 8192), (1, 8193), (2, 16385)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, device):
    grad_output = randn(*shape, seed=3, device=device)
    judge(input=randn(*shape, device=device), grad_output=grad_output, natural=1.0, **affine(shape[-1], device))


@pytest.mark.parametrize("width", [2, 3, 4])
def test_narrow_rows_whose_gradient_cancels(width, device):
    x, grad_output = randn(40, width, device=device) * 10, randn(40, width, seed=3, device=device)
    judge(input=x, grad_output=grad_output, natural=1.0, gradient_tolerance=4e-6, **affine(width, device))


@pytest.mark.parametrize("shape", [(2, 70_000), (1, 262_144), (70_000, 3)], ids=str)
def test_wide_and_many_rows(shape, device):
    if runtime.interpreting() and shape[0] > 1000:
        pytest.skip("thousands of interpreted programs")
    # Of three values a few lie so close together that the division by their spread shows.
    tolerance = 4e-7 if shape[-1] > 3 else 4e-6
    grad_output = randn(*shape, seed=3, device=device)
    judge(tolerance, input=randn(*shape, device=device), grad_output=grad_output, **affine(shape[-1], device))


@pytest.mark.parametrize("gradient", STRIDED)
@pytest.mark.parametrize("layout", [layout for layout in STRIDED if layout != "expanded scalar"])
def test_strided_inputs_and_gradients(layout, gradient, device):
    weight, bias = randn(48, seed=1, device=device)[::2], randn(24, 2, seed=2, device=device)[:, 1]
    grad_output = STRIDED[gradient](device)
    judge(input=STRIDED[layout](device), weight=weight, bias=bias, grad_output=grad_output, natural=1.0)


@pytest.mark.parametrize("given", [(), ("weight",), ("bias",), ("weight", "bias")], ids=str)
def test_each_parameter_is_optional(given, device):
    parameters = {name: value for name, value in affine(50, device).items() if name in given}
    judge(input=randn(6, 50, device=device), grad_output=randn(6, 50, seed=3, device=device), **parameters)


@pytest.mark.parametrize("trained", ["input", "weight", "bias"])
def test_what_is_frozen_gets_no_gradient(trained, device):
    tensors = {"input": randn(3, 8, device=device), **affine(8, device)}
    tensors[trained].requires_grad_()
    layer_norm(**tensors).sum().backward()
    assert [name for name, value in tensors.items() if value.grad is not None] == [trained]


@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_parameters_dtype_may_differ(dtype, parameter_dtype, device):
    x = randn(6, 50, device=device, dtype=dtype)
    parameters = {name: value.to(parameter_dtype) for name, value in affine(50, device).items()}
    output, _ = judge(2 * max(torch.finfo(dtype).eps, 2e-7), 2e-2, input=x, **parameters)
    assert output.dtype == dtype


def test_gradcheck(device):
    tensors = [randn(*s, device=device, dtype=torch.float64).requires_grad_() for s in [(2, 3, 5), (5,), (5,)]]
    assert torch.autograd.gradcheck(layer_norm, tensors)


def test_second_derivatives_are_refused(device):
    x = randn(2, 5, device=device).requires_grad_()
    (gradient,) = torch.autograd.grad(layer_norm(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="layer_norm_backward has no derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "input must have a floating-point dtype, got torch.int64", {"input": torch.ones(3).long()}),
        (ValueError, "input must have at least one dimension, got a scalar", {"input": torch.ones(())}),
        (TypeError, "bias must have a floating-point dtype, got torch.int32", {"bias": torch.ones(8).int()}),
        (
            ValueError,
            r"weight must have the shape \[8\] of input's last dimension, got \[7\]",
            {"weight": torch.ones(7)},
        ),
        (ValueError, r"bias must have the shape \[8\] of input's last dimension, got \[1\]", {"bias": torch.ones(1)}),
        (ValueError, "bias is on meta, input on cpu", {"bias": torch.ones(8, device="meta")}),
    ],
)
def test_bad_input_is_refused_with_the_argument_and_what_fits(error, message, arguments):
    with pytest.raises(error, match=f"layer_norm: {message}"):
        layer_norm(**{"input": torch.ones(2, 8), **arguments})
