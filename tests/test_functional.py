"""fusedops.functional against torch.nn.functional: signatures, results, gradients, autocast, refusals, tracing."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedops.functional as FF
from fusedops import FallbackWarning, runtime


def randn(*shape, device, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(actual, expected, dtype=torch.float32):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12}.get(dtype, 2e-2)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "softmax", "log_softmax"])
def test_signatures_are_torchs(name):
    def parameters(function):
        return [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]

    assert parameters(getattr(FF, name)) == parameters(getattr(F, name))


def test_signature_of_attention():
    # torch's is a builtin; its documentation has the signature
    names = [*inspect.signature(FF.scaled_dot_product_attention).parameters]
    documented = (F.scaled_dot_product_attention.__doc__ or "").split(")")[0]
    assert all(name in documented for name in names)
    assert names[:7] == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"]


NORMS = {
    "rms": lambda f, x, w, b: f.rms_norm(x, w.shape, w),
    "rms eps": lambda f, x, w, b: f.rms_norm(x, w.shape, w, 0.5),
    "rms bare": lambda f, x, w, b: f.rms_norm(x, w.shape),
    "layer": lambda f, x, w, b: f.layer_norm(x, w.shape, w, b),
    "layer no bias": lambda f, x, w, b: f.layer_norm(x, list(w.shape), w),
    "layer bare": lambda f, x, w, b: f.layer_norm(x, w.shape, eps=0.3),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "dims"), [((3, 5, 8), 1), ((3, 5, 8), 2), ((6,), 1), ((2, 3, 4, 2), 3), ((0, 4), 1)])
def test_norms_and_their_gradients(norm, dtype, shape, dims, device):
    def run(functions):
        x = randn(*shape, device=device, dtype=dtype).requires_grad_()
        w, b = (randn(*shape[-dims:], device=device, dtype=dtype, seed=s).requires_grad_() for s in (1, 2))
        y = NORMS[norm](functions, x, w, b)
        grads = torch.autograd.grad(y, (x, w, b), randn(*shape, device=device, dtype=dtype, seed=3), allow_unused=True)
        return y, grads

    ours, theirs = run(FF), run(F)
    close(ours[0], theirs[0], dtype)
    for grad, expected in zip(ours[1], theirs[1], strict=True):
        assert (grad is None) == (expected is None)
        if grad is not None:
            close(grad, expected, dtype)


def test_rms_norms_default_eps_is_float32s_for_every_dtype_but_float64(device):
    for dtype, eps in [
        (torch.float32, 2**-23),
        (torch.bfloat16, 2**-23),
        (torch.float16, 2**-23),
        (torch.float64, 2**-52),
    ]:
        x = torch.full((1, 8), math.sqrt(eps), dtype=dtype, device=device)
        close(FF.rms_norm(x, (8,)), F.rms_norm(x, (8,)), dtype)
        close(FF.rms_norm(x, (8,)).double(), torch.full_like(x, 0.5**0.5).double(), dtype)


@pytest.mark.parametrize("strided", ["transposed", "sliced", "expanded"])
def test_norms_over_several_dims_of_strided_inputs(strided, device):
    x = {
        "transposed": randn(4, 3, 5, device=device).transpose(0, 2),
        "sliced": randn(5, 3, 9, device=device)[..., 2:6],
        "expanded": randn(1, 3, 4, device=device).expand(5, 3, 4),
    }[strided]
    close(FF.rms_norm(x, (3, 4)), F.rms_norm(x, (3, 4)))
    close(FF.layer_norm(x, (3, 4)), F.layer_norm(x, (3, 4)))


def test_norms_refuse_what_does_not_fit(device):
    x = randn(2, 8, device=device)
    for norm in (FF.rms_norm, FF.layer_norm):
        for shape in [(4,), (), (3, 8), (8, 2, 8)]:
            with pytest.raises(ValueError, match="normalized_shape"):
                norm(x, shape)
        with pytest.raises(ValueError, match="weight"):
            norm(x, (2, 8), torch.ones(8, device=device))
        with pytest.raises(ValueError, match="weight"):
            norm(x, (8,), torch.ones(4, device=device))
        with pytest.raises(TypeError):
            norm(x.long(), (8,))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize(("shape", "dim"), [((3, 5), 0), ((3, 5), -1), ((2, 3, 4), 1), ((7,), 0), ((), 0), ((2, 0), 1)])
def test_softmax_and_its_gradient(name, shape, dim, device):
    def run(functions):
        x = randn(*shape, device=device).requires_grad_()
        y = getattr(functions, name)(x, dim)
        return y, *torch.autograd.grad(y, x, randn(*shape, device=device, seed=1))

    for ours, theirs in zip(run(FF), run(F), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_arguments(name, device):
    ours, theirs = getattr(FF, name), getattr(F, name)
    for shape in [(4,), (2, 3), (2, 3, 4), (2, 3, 4, 2)]:
        x = randn(*shape, device=device)
        with pytest.warns(UserWarning, match=f"Implicit dimension choice for {name}") as caught:
            close(ours(x), theirs(x))
        assert {warning.filename for warning in caught} == {__file__}, "both name the caller's line"
    x = randn(2, 3, device=device, dtype=torch.bfloat16)
    close(ours(x, 1, dtype=torch.float32), theirs(x, 1, dtype=torch.float32))
    integers = torch.arange(6, device=device).view(2, 3)
    close(ours(integers, 1, dtype=torch.float32), theirs(integers, 1, dtype=torch.float32))
    with pytest.raises(TypeError):
        ours(integers, 1)
    for dim in (2, -3):
        with pytest.raises(IndexError):
            ours(x, dim)


def attention_inputs(device, heads=2, heads_kv=2, seq=5, seq_kv=5, dtype=torch.float32):
    shapes = [(2, heads, seq, 8), (2, heads_kv, seq_kv, 8), (2, heads_kv, seq_kv, 8)]
    return [randn(*shape, device=device, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.7}, {"heads": 4, "enable_gqa": True}, {"seq_kv": 9}, {"seq": 7, "seq_kv": 3}]
)
def test_attention_and_its_gradients(options, causal, device):
    options = dict(options)
    sizes = {key: options.pop(key) for key in ("heads", "seq", "seq_kv") if key in options}

    def run(functions):
        inputs = [t.requires_grad_() for t in attention_inputs(device, **sizes)]
        y = functions.scaled_dot_product_attention(*inputs, is_causal=causal, **options)
        return y, *torch.autograd.grad(y, inputs, randn(*y.shape, device=device, seed=9))

    for ours, theirs in zip(run(FF), run(F), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 if device == "cuda" else 1e-5)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("lead", [(), (3,), (2, 3, 2)])
def test_attention_of_other_ranks(lead, device):
    q, k, v = (randn(*lead, 5, 8, device=device, seed=s) for s in range(3))
    ours = FF.scaled_dot_product_attention(q, k, v, is_causal=True)
    close(ours, F.scaled_dot_product_attention(q, k, v, is_causal=True), torch.bfloat16)


UNCOVERED: dict[str, dict[str, Any]] = {
    "bool mask": {"attn_mask": torch.ones(5, 5).tril().bool()},
    "float mask": {"attn_mask": torch.linspace(-3, 3, 25).view(5, 5)},
    "dropout": {"dropout_p": 0.5},
}


@pytest.mark.parametrize("case", UNCOVERED)
def test_attention_the_kernel_does_not_cover_is_torchs(case, device, monkeypatch):
    inputs = attention_inputs(device)
    options: dict[str, Any] = {k: v.to(device) if torch.is_tensor(v) else v for k, v in UNCOVERED[case].items()}
    torch.manual_seed(0)
    expected = F.scaled_dot_product_attention(*inputs, **options)
    torch.manual_seed(0)
    runtime.dispatch._warn_once.cache_clear()
    warns = pytest.warns(FallbackWarning) if device == "cuda" else contextlib.nullcontext()
    with warns:
        close(FF.scaled_dot_product_attention(*inputs, **options), expected)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as if the kernel would run
    with runtime.strict(), pytest.raises(RuntimeError, match=next(iter(options))):
        FF.scaled_dot_product_attention(*inputs, **options)


@pytest.mark.filterwarnings("ignore::fusedops.FallbackWarning")
def test_attention_refuses_as_torch_does(device):
    q, k, v = attention_inputs(device, heads=4)
    refused: list[tuple[Any, dict[str, Any]]] = [
        ((q, k, v), {}),  # 4 and 2 heads without enable_gqa
        ((q, q, q), {"dropout_p": 2.0}),
        ((k, k.half(), v), {}),
        ((k, k[..., :4], v), {}),
        ((q[:, :3], k, v), {"enable_gqa": True}),
    ]
    for arguments, options in refused:
        try:
            F.scaled_dot_product_attention(*arguments, **options)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                FF.scaled_dot_product_attention(*arguments, **options)
        else:
            assert device == "cuda", "PyTorch's CPU version refuses them all; its GPU versions let some pass"


def test_autocast_on_the_gpu_is_pytorchs():
    """By fake tensors, which need no GPU: dtypes alone."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.float16)
    try:
        with FakeTensorMode():
            for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
                x = torch.empty(1, 2, 4, 8, dtype=dtype, device="cuda")
                w = torch.empty(8, dtype=torch.float32, device="cuda")
                for call in (
                    lambda f, x=x, w=w: f.rms_norm(x, (8,), w.to(x.dtype)),
                    lambda f, x=x, w=w: f.layer_norm(x, (8,), w.to(x.dtype), w.to(x.dtype)),
                    lambda f, x=x: f.softmax(x, -1),
                    lambda f, x=x: f.log_softmax(x, -1),
                    lambda f, x=x: f.softmax(x, -1, dtype=torch.float16),
                    lambda f, x=x: f.scaled_dot_product_attention(x, x, x),
                ):
                    assert call(FF).dtype == call(F).dtype
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_autocast_on_the_device(device):
    x, w = randn(2, 3, 4, 8, device=device), torch.ones(8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        for call in (
            lambda f: f.rms_norm(x.bfloat16(), (8,), w.bfloat16()),
            lambda f: f.layer_norm(x, (8,), w, w),
            lambda f: f.softmax(x.bfloat16(), -1),
            lambda f: f.scaled_dot_product_attention(x, x, x),
        ):
            close(call(FF), call(F), torch.bfloat16)
        codes = torch.zeros(4, 8 * 4, dtype=torch.int32, device=device)
        scales = torch.ones(4, 8, device=device)
        assert FF.int4_linear(randn(2, 256, device=device), codes, scales, scales).dtype == torch.bfloat16
        weight = torch.ones(16, 32, device=device).to(torch.float8_e4m3fn)
        assert FF.fp8_linear(randn(2, 32, device=device), weight, scales[0, 0]).dtype == torch.bfloat16


@pytest.mark.skipif(runtime.interpreting(), reason="the compiler traces to the same operators")
def test_compiles_without_a_graph_break(device):
    def function(x, w):
        y = FF.layer_norm(FF.rms_norm(x, (4, 8), w), (8,))
        y = FF.log_softmax(FF.softmax(y, 1), -1, dtype=torch.float32)
        y = FF.scaled_dot_product_attention(y, y, y, is_causal=True)
        return FF.scaled_dot_product_attention(y, y, y, attn_mask=torch.ones(4, 4, dtype=torch.bool, device=x.device))

    x = randn(2, 3, 4, 8, device=device).requires_grad_()
    w = randn(4, 8, device=device, seed=1)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    close(compiled(x, w), function(x, w))
    (grad,) = torch.autograd.grad(compiled(x, w).sum(), x)
    close(grad, torch.autograd.grad(function(x, w).sum(), x)[0])


def test_nested_tensors_run_torchs_function():
    parts = [torch.randn(3, 8), torch.randn(5, 8)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    for function in (
        lambda f: f.rms_norm(nested, (8,)),
        lambda f: f.layer_norm(nested, (8,)),
        lambda f: f.softmax(nested, -1),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours, theirs = function(FF), function(F)
        assert ours.is_nested
        assert torch.equal(ours.values(), theirs.values())
