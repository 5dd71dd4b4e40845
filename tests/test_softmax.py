"""softmax and log_softmax: the kinds of fault that users report, judged by the float64 reference."""

from __future__ import annotations

import math

import pytest
import torch
from judging import STRIDED, judge, randn

from fusedops import runtime
from fusedops.catalog import check, get
from fusedops.catalog.softmax.op import _mask_access, log_softmax, softmax

pytestmark = pytest.mark.usefixtures("poisoned")
INF = math.inf
BOTH = pytest.mark.parametrize("function", [softmax, log_softmax], ids=["softmax", "log_softmax"])
WIDE = 40_000  # more than one tile of every config


@pytest.fixture(params=["one tile", "walked"])
def walk(request):
    """A test with this fixture runs in one tile, and walking in tiles of 16 columns."""
    if request.param == "one tile":
        yield
        return
    config = {"BLOCK_M": 2, "BLOCK_N": 16, "STAGES": 1, "PROGRAMS": 1, "num_warps": 4}
    table = get("softmax").configs
    with table.trial("softmax_forward", config), table.trial("softmax_backward", config):
        yield


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


MASKS = {
    "all": (2, 3, 5, 40),
    "shared by heads": (2, 1, 5, 40),
    "of keys": (2, 1, 1, 40),
    "of a head": (3, 1, 1),
    "of queries and keys": (5, 40),
    "of rows": (2, 3, 5, 1),
    "of columns": (40,),
    "of nothing": (),
}


@BOTH
@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize("kind", ["bool", "floating"])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_masks_of_every_broadcast(function, kind, shape, device):
    mask = randn(*shape, seed=1, device=device)
    if kind == "bool":
        mask = mask > (-0.5 if shape else -9.0)
    x, dy = randn(2, 3, 5, 40, device=device), randn(2, 3, 5, 40, seed=2, device=device)
    if kind == "floating" and (not shape or shape[-1] == 1):  # its gradient is 0, of which nothing is a relative error
        output = function(x, mask=mask.requires_grad_())
        torch.testing.assert_close(output.double(), function(x.double()), atol=1e-6, rtol=1e-6)
        (gradient,) = torch.autograd.grad(output, mask, dy)
        torch.testing.assert_close(gradient, torch.zeros_like(mask), atol=1e-4, rtol=0)
    else:
        of(function, 8e-7, input=x, mask=mask, scale=0.3, grad_output=dy, natural=1.0)


@pytest.mark.parametrize(
    ("layout", "moved"),
    [
        (lambda mask: mask.transpose(-1, -2).contiguous().transpose(-1, -2), True),
        (lambda mask: mask[:, :1].expand_as(mask), False),
        (lambda mask: mask[..., :1].expand_as(mask), False),
        (lambda mask: mask[:1, :1].expand_as(mask), False),
    ],
    ids=["columns", "heads", "along the row", "batch and heads"],
)
@pytest.mark.usefixtures("walk")
def test_masks_are_read_in_their_own_strides(layout, moved, device):
    x, mask = randn(2, 3, 5, 40, device=device), layout(randn(2, 3, 5, 40, seed=1, device=device))
    of(softmax, 8e-7, input=x, mask=mask.detach(), grad_output=randn(2, 3, 5, 40, seed=2, device=device), natural=1.0)
    access = _mask_access(mask, x.shape)
    assert (access.of(mask).data_ptr() == mask.data_ptr()) != moved, "no copy where the strides can tell"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32], ids=str)
def test_a_mask_in_another_dtype(dtype, device):
    x, mask = randn(6, 30, device=device, dtype=torch.float16), randn(6, 30, seed=1, device=device, dtype=dtype)
    output, gradients = of(softmax, 1e-3, 1e-2, input=x, mask=mask, grad_output=randn(6, 30, device=device).half())
    assert (output.dtype, gradients["mask"].dtype) == (torch.float16, dtype)


def test_a_mask_that_needs_more_than_three_dimensions(device):
    shape = (2, 3, 2, 3, 2, 9)
    mask = randn(2, 1, 2, 1, 2, 9, seed=1, device=device)
    of(softmax, 8e-7, input=randn(*shape, device=device), mask=mask, grad_output=randn(*shape, seed=2, device=device))


@BOTH
@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize(("q", "k"), [(33, 33), (5, 40), (40, 5), (1, 17), (17, 1), (3, 0), (0, 3)])
def test_causal_is_aligned_bottom_right(function, q, k, device):
    x, dy = randn(2, q, k, device=device), randn(2, q, k, seed=1, device=device)
    output, gradients = of(function, 8e-7, input=x, scale=0.5, causal=True, grad_output=dy, natural=1.0)
    hidden = torch.ones(q, k, dtype=torch.bool, device=device).triu(k - q + 1)
    assert (gradients["input"][:, hidden] == 0).all()
    nothing = hidden.all(-1) if k else hidden.new_zeros(q)
    assert output[:, nothing].isnan().all()
    assert (output[:, hidden & ~nothing[:, None]] == (0 if function is softmax else -INF)).all()


@BOTH
@pytest.mark.usefixtures("walk")
def test_what_is_hidden_is_not_counted(function, device):
    """NaN and inf above the diagonal, or where a bool mask is False, change neither the output nor the gradient."""
    x, dy = randn(4, 24, device=device), randn(4, 24, seed=1, device=device)
    visible = torch.ones(4, 24, dtype=torch.bool, device=device).tril(20)
    for options in ({"causal": True}, {"mask": visible}):
        runs = []
        for rest in (0.0, math.nan, INF):
            rows = torch.where(visible, x, rest).requires_grad_()
            output = function(rows, **options)
            runs.append((output, *torch.autograd.grad(output, rows, dy)))
        for other in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@BOTH
@pytest.mark.usefixtures("walk")
def test_rows_with_nothing_kept_are_nan_and_alone_so(function, device):
    x = randn(3, 40, device=device).requires_grad_()
    mask = torch.ones(3, 40, dtype=torch.bool, device=device)
    mask[1] = False
    output = function(x, mask=mask)
    assert output[1].isnan().all()
    assert output[[0, 2]].isfinite().all()
    (gradient,) = torch.autograd.grad(output, x, torch.ones_like(output))
    assert (gradient[1] == 0).all()
    added = torch.zeros(3, 40, device=device).masked_fill(~mask, -INF)
    torch.testing.assert_close(function(x, mask=added), output, equal_nan=True)


@BOTH
def test_gradcheck_with_a_mask(function, device):
    x, mask = (randn(*s, device=device, dtype=torch.float64).requires_grad_() for s in [(2, 3, 5), (3, 5)])
    assert torch.autograd.gradcheck(lambda x, m: function(x, scale=0.7, mask=m), (x, mask))
    assert torch.autograd.gradcheck(lambda x, m: function(x, 1, scale=0.7, mask=m), (x, mask))


@BOTH
@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (
            TypeError,
            "mask must have a floating-point dtype or torch.bool, got torch.int64",
            {"mask": torch.ones(3).long()},
        ),
        (ValueError, r"mask must be broadcastable to input's shape \[2, 3\], got \[2\]", {"mask": torch.ones(2)}),
        (ValueError, r"mask must be .*, got \[1, 2, 3\]", {"mask": torch.ones(1, 2, 3)}),
        (ValueError, "mask is on meta, input on cpu", {"mask": torch.ones(3, device="meta")}),
        (ValueError, r"causal needs .* got dim=0 for input of shape \[2, 3\]", {"dim": 0, "causal": True}),
    ],
)
def test_bad_masks_are_refused(function, error, message, arguments):
    with pytest.raises(error, match=f"^{function.__name__}: {message}"):
        function(torch.ones(2, 3), **arguments)


if runtime.interpreting():
    import triton
    import triton.language as tl

    @triton.jit
    def gather_at_once(slots, count, COUNT: tl.constexpr):
        index = tl.arange(0, COUNT)
        word = tl.load(slots + index, index < count, other=0)
        return (word & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)


@BOTH
@pytest.mark.skipif(not runtime.interpreting(), reason="a look at the kernels alone, one program after another")
@pytest.mark.parametrize(("width", "splits"), [(100, 1), (100, 4), (97, 7)])
@pytest.mark.parametrize("hidden", ["nothing", "a mask", "causal"])
def test_rows_shared_by_programs(function, width, splits, hidden, monkeypatch, device):
    """Programs that run one after another can't wait for each other, so the launch is made twice with the same slots:
    the first fills them, with a gather that doesn't wait, and the second finds what all programs published.
    """
    from fusedops.catalog.softmax import backward, kernel

    for module in (kernel, backward):
        monkeypatch.setattr(module, "gather", gather_at_once)
    rows, groups, log = 5, 2, function is log_softmax
    chunk = -(-width // splits)
    x, dy = randn(rows, width, device=device), randn(rows, width, seed=1, device=device)
    x[1, :chunk] = -INF
    mask = randn(rows, width, seed=2, device=device) > -0.5 if hidden == "a mask" else None
    causal = hidden == "causal"
    slots = torch.zeros(2, rows, 2, splits, dtype=torch.int64, device=device)
    scalars = (rows, width, chunk, splits, width)
    rest = (rows, 1, rows, 0, 0, width, 0.5)
    options = {"LOG": log, "CAUSAL": causal, "MASK_COLUMNS": mask is not None, "SPLITS": 8, "BLOCK_N": 128}
    y, dx = torch.full_like(x, math.nan), torch.full_like(x, math.nan)
    for _ in range(2):
        kernel.softmax_forward_split[(groups * splits,)](x, mask, y, slots[0], *scalars, *rest, **options)
    for _ in range(2):
        backward.softmax_backward_split[(groups * splits,)](
            dy, y, mask, dx, slots[1], *scalars, width, *rest, **options
        )
    rows = x.requires_grad_()
    output = function(rows, scale=0.5, mask=mask, causal=causal)
    torch.testing.assert_close(y, output, rtol=1e-5, atol=1e-6, equal_nan=True)
    gradient = torch.autograd.grad(output, rows, dy)[0]
    torch.testing.assert_close(dx, gradient, rtol=1e-5, atol=1e-6, equal_nan=True)


@BOTH
@pytest.mark.skipif(runtime.interpreting(), reason="needs programs that run at once")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 131_072), (300, 40_003), (77, 131_072)])
def test_rows_shared_by_programs_on_a_gpu(function, rows, width, dtype, device):
    if device != "cuda" or torch.version.hip:
        pytest.skip("needs an NVIDIA GPU")
    x, dy = randn(rows, width, device=device, dtype=dtype) * 4, randn(rows, width, seed=1, device=device, dtype=dtype)
    x[rows // 2, : width - 3] = -INF
    tolerance = 8e-7 if dtype == torch.float32 else 4e-3
    output, gradients = of(function, tolerance, input=x, scale=0.5, grad_output=dy, natural=1e-6)
    again, more = of(function, tolerance, input=x.detach().clone(), scale=0.5, grad_output=dy, natural=1e-6)
    assert torch.equal(output, again)
    assert torch.equal(gradients["input"], more["input"])
