"""rms_norm: the kinds of fault that users report, judged by the float64 reference."""

from __future__ import annotations

import functools
import math

import judging
import pytest
import torch
from judging import STRIDED, randn

from fusedops import runtime
from fusedops.catalog.rms_norm.op import rms_norm

pytestmark = pytest.mark.usefixtures("poisoned")
judge = functools.partial(judging.judge, "rms_norm", "rms_norm")


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-18, 1e18, 1e30, 1e38])
@pytest.mark.parametrize("width", [5, 9000])
def test_values_whose_squares_leave_float32(size, width, device):
    x = randn(2, width, device=device) / 5 * size
    judge(input=x, weight=randn(width, seed=1, device=device), grad_output=randn(2, width, seed=2, device=device))


@pytest.mark.parametrize("eps", [0.0, 1e-30])
def test_tiny_values_with_a_tiny_eps(eps, device):
    judge(input=randn(3, 40, device=device) * 1e-18, eps=eps, grad_output=randn(3, 40, seed=1, device=device))


def test_a_row_does_not_depend_on_its_neighbours(device):
    x = randn(4, 100, device=device)
    alone = rms_norm(x)
    x[1], x[2] = 0, 1e30
    assert torch.equal(rms_norm(x)[[0, 3]], alone[[0, 3]])


def test_zero_rows_give_zeros_and_a_finite_gradient(device):
    x = torch.zeros(3, 33, device=device, requires_grad=True)
    output = rms_norm(x, eps=1e-6)
    output.sum().backward()
    assert torch.equal(output, torch.zeros_like(x))
    torch.testing.assert_close(x.grad, torch.full_like(x, 1e3))


@pytest.mark.parametrize("rest", [0.0, 1.0, 1e30])
def test_nan_makes_its_row_nan_and_no_other(rest, device):
    x = torch.full((2, 9), rest, device=device)
    x[0, 4] = math.nan
    output = rms_norm(x)
    assert output[0].isnan().all()
    assert output[1].isfinite().all()


@pytest.mark.parametrize(
    "shape",
    [(7,), (1, 1), (5, 1), (2, 3, 4), (2, 1, 3, 4), (0, 4), (3, 0), (0,), (1, 8192), (1, 8193), (2, 16385)],
    ids=str,
)
def test_shapes(shape, device):
    judge(
        input=randn(*shape, device=device),
        weight=randn(shape[-1], seed=1, device=device),
        grad_output=randn(*shape, seed=2, device=device),
    )


@pytest.mark.parametrize("shape", [(2, 70_000), (1, 262_144), (70_000, 3)], ids=str)
def test_wide_and_many_rows(shape, device):
    if runtime.interpreting() and shape[0] > 1000:
        pytest.skip("thousands of interpreted programs")
    judge(
        input=randn(*shape, device=device),
        weight=randn(shape[-1], seed=1, device=device),
        grad_output=randn(*shape, seed=2, device=device),
    )


@pytest.mark.parametrize("gradient", STRIDED)
@pytest.mark.parametrize("layout", STRIDED)
def test_strided_inputs_and_gradients(layout, gradient, device):
    weight = randn(48, seed=1, device=device)[::2]
    judge(input=STRIDED[layout](device), weight=weight, grad_output=STRIDED[gradient](device))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_weights_dtype_may_differ(dtype, weight_dtype, device):
    x, weight = randn(6, 50, device=device, dtype=dtype), randn(50, seed=1, device=device, dtype=weight_dtype)
    tolerance = 2 * max(torch.finfo(dtype).eps, 2e-7)
    output, _ = judge(tolerance, input=x, weight=weight, gradient_tolerance=2e-2)
    assert output.dtype == dtype
    assert rms_norm(x, weight, cast_before_weight=True).dtype == torch.promote_types(dtype, weight_dtype)


def test_a_frozen_weight_gets_no_gradient(device):
    x, weight = randn(3, 8, device=device).requires_grad_(), randn(8, device=device)
    rms_norm(x, weight).sum().backward()
    assert weight.grad is None
    weight.requires_grad_()
    (gradient,) = torch.autograd.grad(rms_norm(x.detach(), weight).sum(), weight)
    assert gradient.shape == (8,)


@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0}, {"cast_before_weight": True}], ids=str)
def test_gradcheck(options, device):
    x, weight = (randn(*s, device=device, dtype=torch.float64).requires_grad_() for s in [(2, 3, 5), (5,)])
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, **options), (x, weight))


def test_second_derivatives_are_refused(device):
    x = randn(2, 5, device=device).requires_grad_()
    (gradient,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="rms_norm_backward has no derivative"):
        gradient.sum().backward()


@pytest.mark.skipif(
    runtime.interpreting(), reason="kernels add in another order than PyTorch, and truncate to bfloat16"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("model", "options"), [("Llama", {"cast_before_weight": True}), ("Gemma", {"weight_offset": 1.0})], ids=str
)
def test_on_a_cpu_bit_equal_to_the_models_own(model, options, dtype):
    modeling = pytest.importorskip(f"transformers.models.{model.lower()}.modeling_{model.lower()}")
    module = getattr(modeling, f"{model}RMSNorm")(96, eps=1e-5).to(dtype)
    with torch.no_grad():
        module.weight.copy_(randn(96, seed=1))
        x = randn(40, 96, dtype=dtype) * 3
        x[3] = 0  # as padding is: no reason to round the others otherwise
        assert torch.equal(rms_norm(x, module.weight, 1e-5, **options), module(x))


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "input must have a floating-point dtype, got torch.int64", {"input": torch.ones(3).long()}),
        (ValueError, "input must have at least one dimension, got a scalar", {"input": torch.ones(())}),
        (TypeError, "weight must have a floating-point dtype, got torch.int32", {"weight": torch.ones(8).int()}),
        (
            ValueError,
            r"weight must have the shape \[8\] of input's last dimension, got \[7\]",
            {"weight": torch.ones(7)},
        ),
        (ValueError, r"weight must have the shape .* got \[1, 8\]", {"weight": torch.ones(1, 8)}),
        (ValueError, "weight is on meta, input on cpu", {"weight": torch.ones(8, device="meta")}),
    ],
)
def test_bad_input_is_refused_with_the_argument_and_what_fits(error, message, arguments):
    with pytest.raises(error, match=f"rms_norm: {message}"):
        rms_norm(**{"input": torch.ones(2, 8), **arguments})
