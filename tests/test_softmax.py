"""softmax and log_softmax: the kinds of fault that users report, judged by the float64 reference."""

from __future__ import annotations

import math

import pytest
import torch
from judging import STRIDED, judge, randn

from fusedops import runtime
from fusedops.catalog import check, get
from fusedops.catalog.softmax.op import log_softmax, softmax

pytestmark = pytest.mark.usefixtures("poisoned")
INF = math.inf
BOTH = pytest.mark.parametrize("function", [softmax, log_softmax], ids=["softmax", "log_softmax"])
WIDE = 20_000  # more than one tile of every config


def of(function, *args, **kwargs):
    return judge("softmax", function.__name__, *args, **kwargs)


@BOTH
@pytest.mark.parametrize("width", [5, WIDE])
def test_infinite_scores_are_pytorchs(function, width, device):
    rows = torch.zeros(6, width, device=device)
    rows[0] = -INF
    rows[1, 2] = INF
    rows[2, 1:] = -INF
    rows[3, 3] = math.nan
    rows[4] = torch.finfo(torch.float32).min
    rows[5, 0], rows[5, 1] = 3e38, -3e38
    torch.testing.assert_close(function(rows), getattr(torch, function.__name__)(rows, -1), equal_nan=True)


@BOTH
@pytest.mark.parametrize("masked", [slice(0, 9000), slice(11_000, None), slice(8192, 16_384), slice(0, -1)], ids=str)
def test_tiles_of_minus_infinity_do_not_poison_their_row(function, masked, device):
    x = randn(2, WIDE, device=device)
    x[:, masked] = -INF
    output = function(x.requires_grad_())
    kept = torch.ones(WIDE, dtype=torch.bool)
    kept[masked] = False
    assert (output[:, ~kept] == (0 if function is softmax else -INF)).all()
    reference = next(one for one in get("softmax").operators if one.name == function.__name__).reference
    assert check.error(output[:, kept], reference(check.to_numpy(x[:, kept]))) <= 4e-7
    (gradient,) = torch.autograd.grad(output[:, kept].square().sum(), x)
    assert gradient.isfinite().all()
    assert (gradient[:, ~kept] == 0).all()


@BOTH
@pytest.mark.parametrize(
    "shape", [(2, 70_000), (1, 262_144), (70_000, 3), (1, 1), (5, 1), (3, 0), (0, 3), (7,)], ids=str
)
def test_widths_and_rows(function, shape, device):
    if runtime.interpreting() and shape[0] > 1000:
        pytest.skip("thousands of interpreted programs")
    of(function, input=randn(*shape, device=device), grad_output=randn(*shape, seed=1, device=device), natural=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_wide_rows_have_relative_precision(dtype, device):
    """Each value is about 1e-5, where an absolute tolerance would pass zeros."""
    x = (randn(2, 100_000, device=device) / 4).to(dtype)
    expected = torch.softmax(x.double(), -1)
    # float16's subnormal numbers lie 6e-8 apart.
    rtol, atol = (2e-6, 0.0) if dtype == torch.float32 else (2e-3, 6e-8)
    torch.testing.assert_close(softmax(x).double(), expected, rtol=rtol, atol=atol)


@BOTH
@pytest.mark.parametrize("size", [1e-30, 1e3, 1e30])
def test_large_and_small_scores(function, size, device):
    x, grad_output = randn(4, 33, device=device) * size, randn(4, 33, seed=1, device=device)
    of(function, input=x, grad_output=grad_output, natural=1.0)


@pytest.mark.skipif(runtime.interpreting(), reason="the interpreter truncates to bfloat16, which rounds 1 - 2^-10 down")
def test_the_gradient_of_a_saturated_bfloat16_row(device):
    """y·(dy − Σ y·dy) of rounded y, which needs not sum to 1, is off by as much as it is."""
    x = torch.tensor([[6.0, 0.0]], dtype=torch.bfloat16, device=device)
    grad_output = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16, device=device)
    _, gradients = of(softmax, 1e-2, 1e-2, input=x, grad_output=grad_output, natural=1e-9)
    assert gradients["input"].sum().abs() <= 1e-2 * gradients["input"].abs().sum()


@BOTH
@pytest.mark.parametrize("dim", [0, 1, -1, -3])
@pytest.mark.parametrize("shape", [(3, 5, 7), (4, 1, 2), (1, 6, 1), (2, 0, 3)], ids=str)
def test_any_dimension(function, shape, dim, device):
    output, _ = of(
        function,
        input=randn(*shape, device=device),
        dim=dim,
        grad_output=randn(*shape, seed=1, device=device),
        natural=1.0,
    )
    assert output.stride() == torch.empty(shape).stride()


@BOTH
def test_a_scalar(function, device):
    assert function(torch.tensor(3.0, device=device), 0) == (1 if function is softmax else 0)


@BOTH
@pytest.mark.parametrize("gradient", STRIDED)
@pytest.mark.parametrize("layout", STRIDED)
def test_strided_inputs_and_gradients(function, layout, gradient, device):
    of(function, input=STRIDED[layout](device), grad_output=STRIDED[gradient](device), natural=1.0)


@BOTH
def test_gradcheck(function, device):
    x = randn(2, 3, 5, device=device, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: function(x, 1), x)


@BOTH
def test_second_derivatives_are_refused(function, device):
    x = randn(2, 5, device=device).requires_grad_()
    (gradient,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="softmax_backward has no derivative"):
        gradient.square().sum().backward()


@BOTH
def test_bad_input_is_refused_with_the_argument_and_what_fits(function):
    with pytest.raises(
        TypeError, match=f"^{function.__name__}: input must have a floating-point dtype, got torch.int64"
    ):
        function(torch.ones(3, dtype=torch.int64))
    message = rf"^{function.__name__}: dim must be from -2 to 1 for input of shape \[2, 3\], got 2"
    with pytest.raises(IndexError, match=message):
        function(torch.ones(2, 3), 2)
