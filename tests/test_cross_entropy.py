"""cross_entropy and its fused linear form: the kinds of fault that users report, judged by the float64 reference."""

from __future__ import annotations

import functools
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from judging import STRIDED, randn

import fusedops.functional as FF
from fusedops import nn, runtime
from fusedops.catalog import check
from fusedops.catalog.cross_entropy.op import cross_entropy, fused_linear_cross_entropy
from fusedops.catalog.cross_entropy.reference import cross_entropy as reference
from fusedops.catalog.cross_entropy.reference import cross_entropy_backward as reference_backward
from fusedops.catalog.cross_entropy.reference import fused_linear_cross_entropy as reference_linear
from fusedops.catalog.cross_entropy.reference import fused_linear_cross_entropy_backward as reference_linear_backward

pytestmark = pytest.mark.usefixtures("poisoned")
INF = math.inf
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
ONE_TILE_AND_WALKED = pytest.mark.parametrize("classes", [7, 20_000])
FORMS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.2},
    "z": {"z_loss": 1e-2},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-2},
}


def targets(*shape, classes, seed=9, device="cpu", dtype=torch.int64):
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def of(input, target, tolerance=1e-6, grad_output=None, **options):
    """Loss and gradient near the reference's, inputs left alone."""
    x = input.detach().requires_grad_()
    before, target_before = x.detach().clone(), target.clone()
    loss = cross_entropy(x, target, **options)
    dy = torch.ones_like(loss) if grad_output is None else grad_output
    (dx,) = torch.autograd.grad(loss, x, dy)
    assert loss.dtype == dx.dtype == x.dtype
    assert loss.is_contiguous()
    assert torch.equal(x, before)
    assert torch.equal(target, target_before)
    values = check.to_numpy(x), check.to_numpy(target)
    assert check.error(loss, reference(*values, **options)) <= tolerance
    expected = reference_backward(check.to_numpy(dy), *values, **options)["input"]
    assert check.error(dx, expected) <= 2 * tolerance
    return loss, dx


@REDUCTIONS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape",
    [(5,), (1, 1), (4, 1), (3, 7), (2, 3, 8), (2, 1, 3, 4), (17, 129), (2, 8192), (2, 8193), (3, 20_011)],
    ids=str,
)
def test_shapes(shape, form, reduction, device):
    dy = randn(*(shape[:-1] if reduction == "none" else ()), seed=3, device=device)
    target = targets(*shape[:-1], classes=shape[-1], device=device)
    of(randn(*shape, device=device) * 3, target, grad_output=dy, reduction=reduction, **FORMS[form])


@pytest.mark.parametrize("shape", [(2, 70_000), (1, 262_144), (70_000, 3)], ids=str)
def test_wide_and_many_rows(shape, device):
    if runtime.interpreting() and shape[0] > 1000:
        pytest.skip("thousands of interpreted programs")
    of(randn(*shape, device=device), targets(shape[0], classes=shape[1], device=device), z_loss=1e-3)


@REDUCTIONS
@pytest.mark.parametrize("ignore_index", [-100, 2, 10**12])
@ONE_TILE_AND_WALKED
def test_ignored_tokens(classes, ignore_index, reduction, device):
    x, target = randn(6, classes, device=device), targets(6, classes=classes, device=device)
    target[1] = target[4] = ignore_index
    x[1], x[4, 3] = math.nan, INF  # not even read
    x = x.requires_grad_()
    options = {"ignore_index": ignore_index, "label_smoothing": 0.1, "z_loss": 1e-2, "reduction": reduction}
    loss = cross_entropy(x, target, **options)
    (dx,) = torch.autograd.grad(loss.sum(), x)
    kept = [0, 2, 3, 5]
    expected = reference(check.to_numpy(x[kept]), check.to_numpy(target[kept]), **options)
    assert check.error(loss[kept] if reduction == "none" else loss, expected) <= 1e-6
    assert dx[[1, 4]].eq(0).all()
    rest = cross_entropy(x[kept], target[kept], **options)
    assert torch.equal(dx[kept], torch.autograd.grad(rest.sum(), x)[0][kept])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@REDUCTIONS
def test_all_tokens_ignored_is_pytorchs(reduction, dtype, device):
    x, target = randn(3, 5, device=device, dtype=dtype).requires_grad_(), torch.full((3,), -100, device=device)
    weight = randn(5, 5, device=device, dtype=dtype)
    expected = F.cross_entropy(x, target, reduction=reduction)
    for loss in (
        cross_entropy(x, target, reduction=reduction),
        fused_linear_cross_entropy(x, weight, target, reduction=reduction),
    ):
        assert torch.equal(loss.isnan(), expected.isnan())
        assert loss.nan_to_num().eq(0).all()
        assert torch.autograd.grad(loss.sum(), x)[0].eq(0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_tokens(reduction, device):
    x, target = randn(0, 5, device=device).requires_grad_(), torch.zeros(0, dtype=torch.int64, device=device)
    expected = F.cross_entropy(x, target, reduction=reduction)
    weight = randn(5, 5, device=device).requires_grad_()
    for loss in (
        cross_entropy(x, target, reduction=reduction),
        fused_linear_cross_entropy(x, weight, target, reduction=reduction),
    ):
        torch.testing.assert_close(loss, expected, equal_nan=True)
        assert torch.autograd.grad(loss, x)[0].shape == (0, 5)
    assert cross_entropy(x, target, reduction="none").shape == (0,)


@pytest.mark.parametrize("size", [1e-30, 1e4, 1e30])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@ONE_TILE_AND_WALKED
def test_huge_and_tiny_logits(classes, smoothing, size, device):
    x, target = randn(4, classes, device=device) * size, targets(4, classes=classes, device=device)
    target[0] = x[0].argmax()
    of(x, target, label_smoothing=smoothing, tolerance=3e-6)


@pytest.mark.parametrize("offset", [1e4, -1e4, 1e6, -1e6])
@ONE_TILE_AND_WALKED
def test_a_common_offset_changes_nothing(classes, offset, device):
    x = (randn(3, classes, device=device) * 64).round() / 8 + offset  # exact in float32
    of(x, targets(3, classes=classes, device=device), label_smoothing=0.1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("masked", [slice(0, 3), slice(4, None), slice(0, 9000), slice(8192, 16_384)], ids=str)
@ONE_TILE_AND_WALKED
def test_minus_infinity_at_other_classes_is_pytorchs(classes, masked, smoothing, device):
    x = randn(3, classes, device=device)
    x[:, masked] = -INF
    x[0, :] = -INF
    x[0, 3] = 1.0
    x[:, 3] = 1.0
    target = torch.tensor([3, 3, classes - 1], device=device)  # the last one may be at −inf
    x = x.requires_grad_()
    ours, theirs = (f(x, target, label_smoothing=smoothing, reduction="none") for f in (cross_entropy, F.cross_entropy))
    torch.testing.assert_close(ours, theirs)
    grads = [torch.autograd.grad(loss.sum(), x)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("bad", [math.nan, INF], ids=str)
@ONE_TILE_AND_WALKED
def test_nan_and_infinity_spoil_their_row_and_no_other(classes, bad, device):
    x, target = randn(3, classes, device=device), targets(3, classes=classes, device=device)
    x[1, 4] = bad
    target[1] = 0
    loss = cross_entropy(x, target, reduction="none")
    assert loss.isnan().logical_or(loss.isinf()).tolist() == [False, True, False]
    x[1] = -INF
    assert cross_entropy(x, target, reduction="none").isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("gradient", ["scalar", "row", "strided"])
@pytest.mark.parametrize("layout", STRIDED)
def test_strided_inputs_targets_and_gradients(layout, gradient, device):
    x = STRIDED[layout](device)
    dy = {
        "scalar": torch.full((), 0.5, device=device).expand(2, 5),
        "row": randn(1, 5, device=device).expand(2, 5),
        "strided": randn(5, 4, device=device)[:, ::2].t(),
    }[gradient]
    strided = targets(5, 2, classes=24, device=device).t()
    of(x, strided, grad_output=dy, reduction="none", label_smoothing=0.1)
    of(x, targets(1, 5, classes=24, device=device).expand(2, 5))
    of(x, strided.to(torch.int32))


@pytest.mark.parametrize("classes", [5, 9, 8192 + 3, 50_257])
def test_nothing_beyond_a_row_is_read(classes, device):
    x = torch.full((3, classes + 16), math.nan, device=device)
    x[:, 3:-13] = randn(3, classes, device=device)
    of(x[:, 3:-13], targets(3, classes=classes, device=device), label_smoothing=0.1)


@pytest.mark.parametrize("classes", [1000, 50_257])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@REDUCTIONS
def test_narrow_dtypes_are_not_worse_than_pytorch(reduction, dtype, classes, device):
    x, target = (
        randn(4, classes, device=device, dtype=dtype).requires_grad_(),
        targets(4, classes=classes, device=device),
    )
    values = check.to_numpy(x), check.to_numpy(target)
    dy = torch.full_like(target if reduction == "none" else target[0], 3, dtype=dtype)
    expected = (
        reference(*values, reduction=reduction),
        reference_backward(check.to_numpy(dy), *values, reduction=reduction),
    )
    errors = []
    for function in (cross_entropy, F.cross_entropy):
        loss = function(x, target, reduction=reduction)
        assert loss.dtype == dtype
        (dx,) = torch.autograd.grad(loss, x, dy)
        errors.append((check.error(loss, expected[0]), check.error(dx, expected[1]["input"])))
    eps = torch.finfo(dtype).eps
    assert all(ours <= max(1.25 * theirs, 2 * eps) for ours, theirs in zip(*errors, strict=True)), errors


def test_a_float16_loss_scale_saves_small_gradients(device):
    """p / tokens alone has one bit left in float16 or none; the scale that GradScaler sends comes only later."""
    tokens, classes = 256 if runtime.interpreting() else 4096, 3001
    x = torch.zeros(tokens, classes, device=device, dtype=torch.float16).requires_grad_()
    scale = 2.0**14  # float16 ends at 2^16
    loss = cross_entropy(x, torch.zeros(tokens, device=device, dtype=torch.int64))
    (dx,) = torch.autograd.grad(loss.float() * scale, x)
    expected = torch.full_like(dx[:, 1:], scale / (tokens * classes))
    torch.testing.assert_close(dx[:, 1:], expected, rtol=2e-3, atol=0.0)


@REDUCTIONS
def test_scaled_losses_and_a_graph_that_is_kept(reduction, device):
    x, weight = randn(5, 8, device=device).requires_grad_(), randn(11, 8, seed=1, device=device).requires_grad_()
    target = targets(5, classes=11, device=device)
    for function in (
        lambda: cross_entropy(x @ weight.t(), target, reduction=reduction),
        lambda: fused_linear_cross_entropy(x, weight, target, reduction=reduction),
    ):
        loss = function().sum() * 3
        first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
        kept = [gradient.clone() for gradient in first]
        second = torch.autograd.grad(loss * 2, (x, weight), retain_graph=True)
        third = torch.autograd.grad(loss, (x, weight))
        expected = torch.autograd.grad(
            F.cross_entropy(x @ weight.t(), target, reduction=reduction).sum() * 3, (x, weight)
        )
        for a, b, c, d, e in zip(first, kept, second, third, expected, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, d)
            torch.testing.assert_close(c, 2 * e)
            torch.testing.assert_close(a, e)


def test_an_infinite_upstream_leaves_ignored_rows_at_zero(device):
    x, target = randn(3, 5, device=device).requires_grad_(), torch.tensor([1, -100, 2], device=device)
    upstream = torch.tensor([1.0, INF, 2.0], device=device)
    (dx,) = torch.autograd.grad(cross_entropy(x, target, reduction="none"), x, upstream)
    assert dx[1].eq(0).all()
    assert dx.isfinite().all()


@pytest.mark.parametrize("target", [5, -1, -101, 2**40])
@pytest.mark.parametrize("fused", [False, True])
def test_a_target_that_is_no_class(fused, target, device):
    x, classes = randn(3, 5, device=device).requires_grad_(), torch.tensor([1, target, 2], device=device)
    function = (
        functools.partial(fused_linear_cross_entropy, x, randn(5, 5, device=device))
        if fused
        else (functools.partial(cross_entropy, x))
    )
    if device == "cpu":
        with pytest.raises(IndexError, match=f"target {target} is out of bounds: there are 5 classes"):
            function(classes)
    else:
        loss = function(classes, reduction="none")
        assert loss.isnan().tolist() == [False, True, False]
        (dx,) = torch.autograd.grad(loss.sum(), x)
        assert dx.isnan().all(-1).tolist() == [False, True, False]


@pytest.mark.skipif(not runtime.interpreting(), reason="reads the kernel's answer past the check on a CPU")
@ONE_TILE_AND_WALKED
def test_the_kernel_gives_nan_for_a_target_that_is_no_class(classes):
    from fusedops.catalog.cross_entropy import rows

    x, target = randn(4, classes), torch.tensor([1, classes, 2, -7])
    losses, dx = torch.empty(4), torch.empty(4, classes)
    rows.compute_losses(True, x, target, None, None, losses, dx, rows.Options(-100, 0.0, 0.0))
    assert losses.isnan().tolist() == dx.isnan().all(-1).tolist() == [False, True, False, True]
    assert dx[[0, 2]].isfinite().all()


@pytest.mark.parametrize("options", [{}, *FORMS.values(), {"ignore_index": 1}], ids=str)
@REDUCTIONS
def test_gradcheck(reduction, options, device):
    x, w, b = (randn(*s, device=device, dtype=torch.float64).requires_grad_() for s in [(2, 3, 4), (5, 4), (5,)])
    target = torch.tensor([[0, 1, 4], [2, 2, 3]], device=device)
    logits = (x @ w.t()).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, target, reduction=reduction, **options), logits)

    def fused(x, w, b):
        return fused_linear_cross_entropy(x, w, target, b, reduction=reduction, chunk_tokens=4, **options)

    assert torch.autograd.gradcheck(fused, (x, w, b))


@pytest.mark.parametrize("function", ["cross_entropy", "fused", "fused none"])
def test_second_derivatives_are_refused(function, device):
    x, target = randn(2, 5, device=device).requires_grad_(), targets(2, classes=5, device=device)
    weight = randn(5, 5, device=device)
    loss = {
        "cross_entropy": lambda: cross_entropy(x, target),
        "fused": lambda: fused_linear_cross_entropy(x, weight, target),
        "fused none": lambda: fused_linear_cross_entropy(x, weight, target, reduction="none").sum(),
    }[function]()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(NotImplementedError, match="backward has no derivative"):
        (gradient.sum() + x.sum()).backward()


def fused_arguments(device, tokens=23, hidden=16, classes=70, dtype=torch.float32):
    x = randn(tokens, hidden, device=device, dtype=dtype).requires_grad_()
    weight = (randn(classes, hidden, seed=1, device=device) / hidden**0.5).to(dtype).requires_grad_()
    bias = randn(classes, seed=2, device=device, dtype=dtype).requires_grad_()
    target = targets(tokens, classes=classes, device=device)
    target[3] = -100
    return x, weight, target, bias


@REDUCTIONS
@pytest.mark.parametrize("chunk_tokens", [None, 1, 5, 23, 1000])
@pytest.mark.parametrize("form", FORMS)
def test_chunks_change_nothing(form, chunk_tokens, reduction, device):
    x, weight, target, bias = fused_arguments(device)
    dy = randn(*((23,) if reduction == "none" else ()), seed=4, device=device)
    loss = fused_linear_cross_entropy(
        x, weight, target, bias, reduction=reduction, chunk_tokens=chunk_tokens, **FORMS[form]
    )
    grads = torch.autograd.grad(loss, (x, weight, bias), dy)
    values = [check.to_numpy(value) for value in (x, weight, target, bias)]
    options = {"reduction": reduction, **FORMS[form]}
    assert check.error(loss, reference_linear(*values, **options)) <= 2e-6
    expected = reference_linear_backward(check.to_numpy(dy), *values, **options)
    for name, gradient in zip(("input", "weight", "bias"), grads, strict=True):
        assert check.error(gradient, expected[name]) <= 4e-6, name


@REDUCTIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_in_narrow_dtypes_is_not_worse_than_pytorch(dtype, reduction, device):
    if runtime.interpreting() and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates to bfloat16")
    x, weight, target, bias = fused_arguments(device, tokens=300, hidden=64, classes=200, dtype=dtype)
    values = [check.to_numpy(value) for value in (x, weight, target, bias)]
    dy = torch.full((300,) if reduction == "none" else (), 0.75, device=device, dtype=dtype)
    expected = reference_linear_backward(check.to_numpy(dy), *values, reduction=reduction)
    ours = fused_linear_cross_entropy(x, weight, target, bias, reduction=reduction, chunk_tokens=32)
    theirs = F.cross_entropy(F.linear(x, weight, bias), target, reduction=reduction)
    grads = [torch.autograd.grad(loss, (x, weight, bias), dy) for loss in (ours, theirs)]
    for name, mine, pytorchs in zip(("input", "weight", "bias"), *grads, strict=True):
        assert mine.dtype == dtype
        assert check.error(mine, expected[name]) <= 1.25 * check.error(pytorchs, expected[name]), name


def profiled(step, device):
    """The names of the operations in a step, inside the operators too, and the most bytes that one allocates."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = profile.events()
    kind = "self_cpu_memory_usage" if device == "cpu" else "self_device_memory_usage"
    return [event.name for event in events], max(getattr(event, kind) for event in events)


@REDUCTIONS
def test_the_fused_form_never_has_all_logits(reduction, device):
    x, weight, target, bias = fused_arguments(device, tokens=64, hidden=16, classes=256)
    logits = 64 * 256 * 4

    def step(chunk_tokens=None):
        loss = fused_linear_cross_entropy(x, weight, target, bias, reduction=reduction, chunk_tokens=chunk_tokens)
        loss.sum().backward()

    assert profiled(step, device)[1] < logits
    assert profiled(lambda: step(64), device)[1] >= logits, "or the profiler sees nothing"


@REDUCTIONS
@pytest.mark.parametrize("wanted", [("input",), ("weight",), ("bias",), ("input", "bias"), ()], ids=str)
def test_frozen_tensors_cost_nothing(wanted, reduction, device):
    names = ("input", "weight", "target", "bias")
    arguments = dict(zip(names, fused_arguments(device), strict=True))
    for name in ("input", "weight", "bias"):
        arguments[name] = arguments[name].detach().requires_grad_(name in wanted)

    def step():
        loss = fused_linear_cross_entropy(**arguments, reduction=reduction, chunk_tokens=23).sum()
        if wanted:
            loss.backward()

    operations, _ = profiled(step, device)
    assert {name for name in arguments if arguments[name].grad is not None} == set(wanted)
    products = sum(name in ("aten::mm", "aten::addmm", "aten::addmm_") for name in operations)
    gradients = sum(name != "bias" for name in wanted)
    assert products == 1 + gradients + (reduction == "none" and bool(wanted))


def test_without_a_gradient_there_is_no_gradient_work(device):
    x, target = randn(4, 50, device=device).requires_grad_(), targets(4, classes=50, device=device)
    with torch.no_grad():
        loss, dlogits, _ = torch.ops.fusedops.cross_entropy(x, target, -100, 0.0, 0.0, "mean", False)
        assert dlogits.numel() == 0
        assert torch.equal(cross_entropy(x, target), loss)
    assert torch.equal(cross_entropy(x, target), loss)


@pytest.mark.skipif(runtime.interpreting(), reason="the compiler traces to the same operators")
@REDUCTIONS
def test_compiled_training_step(reduction, device):
    x, weight, target, bias = fused_arguments(device)

    def step(x, weight, bias):
        logits = x @ weight.t() + bias
        loss = cross_entropy(logits, target, reduction=reduction) * 3
        return (loss + fused_linear_cross_entropy(x, weight, target, bias, reduction=reduction)).sum()

    grads = [
        torch.autograd.grad(function(x, weight, bias), (x, weight, bias))
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager"))
    ]
    for eager, compiled in zip(*grads, strict=True):
        torch.testing.assert_close(compiled, eager)


@REDUCTIONS
@pytest.mark.parametrize("needs", [True, False])
def test_opcheck_of_what_the_harness_does_not_draw(needs, reduction, device):
    x, weight, target, bias = fused_arguments(device)
    x.requires_grad_(needs)
    tensors = [tensor.detach().requires_grad_(needs) for tensor in (weight, bias)]
    torch.library.opcheck(torch.ops.fusedops.cross_entropy, (x, target * 0, -100, 0.1, 0.01, reduction, needs))
    torch.library.opcheck(
        torch.ops.fusedops.fused_linear_cross_entropy,
        (x, tensors[0], target, tensors[1], -100, 0.1, 0.01, reduction, 5, needs, needs, needs),
    )
    torch.library.opcheck(
        torch.ops.fusedops.fused_linear_cross_entropy_backward,
        (randn(23, device=device), x.detach(), weight.detach(), target, None, -100, 0.0, 0.0, 5, True, needs, False),
    )


def test_functional_has_torchs_signature():
    def parameters(function):
        return [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]

    assert parameters(FF.cross_entropy) == parameters(F.cross_entropy)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((5,), {}),
        ((4, 5), {"reduction": "sum"}),
        ((4, 5, 3), {"label_smoothing": 0.1}),
        ((2, 5, 3, 2), {"reduction": "none"}),
        ((4, 5), {"size_average": False}),
        ((4, 5), {"reduce": False}),
        ((4, 5), {"weight": torch.linspace(0.2, 1.0, 5)}),
        ((4, 5), {"ignore_index": 3}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:size_average and reduce:UserWarning", "ignore::fusedops.FallbackWarning")
def test_functional_and_module_are_torchs(shape, options, device):
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    x = randn(*shape, device=device).requires_grad_()
    target = targets(*shape[:1][: len(shape) - 1], *shape[2:], classes=5, device=device)
    expected = F.cross_entropy(x, target, **options)
    (dx,) = torch.autograd.grad(expected.sum(), x)
    for loss in (FF.cross_entropy(x, target, **options), nn.CrossEntropyLoss(**options).to(device)(x, target)):
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), x)[0], dx)


@pytest.mark.filterwarnings("ignore::fusedops.FallbackWarning")
def test_what_the_kernel_does_not_cover_is_refused_under_strict(device):
    x, target = randn(4, 5, device=device), targets(4, classes=5, device=device)
    probabilities = torch.softmax(randn(4, 5, seed=1, device=device), -1)
    torch.testing.assert_close(FF.cross_entropy(x, probabilities), F.cross_entropy(x, probabilities))
    if device == "cuda" or runtime.interpreting():
        with runtime.strict(), pytest.raises(runtime.NoKernelError, match="probabilities as targets"):
            FF.cross_entropy(x, probabilities)
        with runtime.strict(), pytest.raises(runtime.NoKernelError, match="class weights"):
            FF.cross_entropy(x, target, torch.ones(5, device=device))


def test_what_pytorch_refuses_is_refused(device):
    x = randn(4, 5, device=device)
    for target, error in [
        (torch.zeros(3, dtype=torch.int64), ValueError),
        (torch.zeros(4, 5, dtype=torch.int64), RuntimeError),
        (torch.zeros(4, dtype=torch.int32), RuntimeError),
    ]:
        for function in (FF.cross_entropy, F.cross_entropy):
            with pytest.raises(error):
                function(x, target.to(device))
    with pytest.raises(ValueError, match="median is not a valid value for reduction"):
        FF.cross_entropy(x, torch.zeros(4, dtype=torch.int64, device=device), reduction="median")


def test_fused_under_autocast(device):
    x, weight, target, bias = fused_arguments(device)
    with torch.autocast(device, torch.bfloat16):
        loss = FF.fused_linear_cross_entropy(x, weight, target, bias)
    loss.backward()
    assert loss.dtype == torch.bfloat16
    assert x.grad.dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss.float(), F.cross_entropy(F.linear(x, weight, bias), target), rtol=2e-2, atol=2e-2)


TARGET = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "input must have a floating-point dtype, got torch.int64", {"input": TARGET.view(2, 1)}),
        (ValueError, "input must have at least one dimension", {"input": torch.ones(())}),
        (TypeError, "target must be int64 or int32, got torch.float32", {"target": torch.zeros(2)}),
        (ValueError, r"target must have the shape \[2\] .* got \[3\]", {"target": torch.zeros(3).long()}),
        (ValueError, "target is on meta, input on cpu", {"target": TARGET.to("meta")}),
        (ValueError, "label_smoothing must be from 0 to 1, got 1.5", {"label_smoothing": 1.5}),
        (ValueError, "reduction must be 'mean', 'sum' or 'none', got 'avg'", {"reduction": "avg"}),
    ],
)
def test_bad_input_is_refused(error, message, arguments):
    with pytest.raises(error, match=f"^cross_entropy: {message}"):
        cross_entropy(**{"input": torch.ones(2, 8), "target": TARGET, **arguments})
    with pytest.raises(error, match=f"fused_linear_cross_entropy: {message}"):
        fused_linear_cross_entropy(
            **{"input": torch.ones(2, 8), "weight": torch.ones(4, 8), "target": TARGET, **arguments}
        )


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "weight has dtype torch.float16, input torch.float32", {"weight": torch.ones(4, 8).half()}),
        (ValueError, r"weight must be \[classes, 8\], got \[4, 7\]", {"weight": torch.ones(4, 7)}),
        (ValueError, "weight must have 2 dimensions", {"weight": torch.ones(8)}),
        (ValueError, r"bias must have the shape \[4\], got \[5\]", {"bias": torch.ones(5)}),
        (ValueError, "there must be at least one class", {"weight": torch.ones(0, 8)}),
        (ValueError, "chunk_tokens must be at least 1, got 0", {"chunk_tokens": 0}),
    ],
)
def test_bad_linear_input_is_refused(error, message, arguments):
    with pytest.raises(error, match=f"fused_linear_cross_entropy: {message}"):
        fused_linear_cross_entropy(
            **{"input": torch.ones(2, 8), "weight": torch.ones(4, 8), "target": TARGET, **arguments}
        )
