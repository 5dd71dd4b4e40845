"""fusedops.nn: the drop-ins against torch's own modules, and the quantized linears as modules."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings

import pytest
import torch

from fusedops import nn, runtime

pytestmark = pytest.mark.filterwarnings("ignore::fusedops.FallbackWarning")


def same_state(ours, theirs):
    ours.load_state_dict(theirs.state_dict())
    return ours.train(theirs.training)


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("LayerNorm", (8,), {}),
        ("LayerNorm", ((4, 8),), {"eps": 0.1}),
        ("LayerNorm", (8,), {"bias": False}),
        ("LayerNorm", (8,), {"elementwise_affine": False}),
        ("RMSNorm", (8,), {}),
        ("RMSNorm", ((4, 8),), {"eps": 0.1}),
        ("RMSNorm", (8,), {"elementwise_affine": False}),
        ("Softmax", (), {"dim": 1}),
        ("LogSoftmax", (-1,), {}),
    ],
)
def test_drop_ins(name, arguments, options, device):
    theirs = getattr(torch.nn, name)(*arguments, **options).to(device)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours = same_state(getattr(nn, name)(*arguments, **options).to(device), theirs)
    assert repr(ours) == repr(theirs)
    x = torch.randn(2, 3, 4, 8, device=device)
    torch.testing.assert_close(ours(x), theirs(x), rtol=2e-5, atol=2e-5)


def test_softmax_without_dim_warns_at_the_callers_line(device):
    for module in (torch.nn.Softmax(), nn.Softmax(), nn.LogSoftmax()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module.to(device)(torch.randn(2, 3, device=device))
        assert [w.filename.endswith("module.py") for w in caught] == [True], "where torch's own points too"


MASKS = ("none", "bool", "float", "padding", "float padding", "bool and padding", "causal", "causal hint", "hint alone")


def masks(kind, length, length_kv, batch, batched, device):
    """Keyword arguments of MultiheadAttention.forward."""
    triangle = torch.ones(length, length_kv, dtype=torch.bool, device=device).triu(1)
    padding = torch.zeros(batch, length_kv, dtype=torch.bool, device=device)
    padding[0, -1] = True
    padding = padding if batched else padding[0]
    bias = torch.linspace(-2, 2, length * length_kv, device=device).view(length, length_kv)
    return {
        "none": {},
        "bool": {"attn_mask": triangle},
        "float": {"attn_mask": bias},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": padding.float() * -5},
        "bool and padding": {"attn_mask": triangle, "key_padding_mask": padding},
        "causal": {"attn_mask": triangle, "is_causal": True},
        "causal hint": {"attn_mask": triangle, "key_padding_mask": padding, "is_causal": True},
        "hint alone": {"is_causal": True},
    }[kind]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    "constructed",
    [{}, {"kdim": 6, "vdim": 10}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}],
    ids=str,
)
def test_multihead_attention_is_torchs_in_all_combinations(constructed, kind, device):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(8, 2, **constructed).to(device)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours = same_state(nn.MultiheadAttention(8, 2, **constructed).to(device), theirs)
    combinations = list(itertools.product([True, False], repeat=5))
    if constructed:  # a third of them, another third for the next kind of mask
        combinations = combinations[MASKS.index(kind) % 3 :: 3]
    for batch_first, self_attention, need_weights, batched, training in combinations:
        for module in (ours, theirs):
            module.batch_first = batch_first
            module.train(training)
        self_attention = self_attention and "kdim" not in constructed
        batch, length, length_kv = 3, 5, 5 if self_attention else 4
        widths = (8, theirs.kdim, theirs.vdim)
        inputs = [
            torch.randn(batch, n, w, device=device) for n, w in zip((length, length_kv, length_kv), widths, strict=True)
        ]
        inputs = [x if batch_first else x.transpose(0, 1) for x in inputs]
        if not batched:
            inputs = [x[0] if batch_first else x[:, 0] for x in inputs]
        if self_attention:
            inputs = [inputs[0]] * 3
        arguments = masks(kind, length, length_kv, batch, batched, device) | {"need_weights": need_weights}
        if need_weights:
            arguments["average_attn_weights"] = training
        with torch.set_grad_enabled(training):
            try:
                expected = theirs(*inputs, **arguments)
            except RuntimeError:
                with pytest.raises(RuntimeError):
                    ours(*inputs, **arguments)
                continue
            actual = ours(*inputs, **arguments)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3 if device == "cuda" else 1e-5)


def test_multihead_attentions_gradients_and_which_calls_the_kernel_takes(device):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(8, 2, dropout=0.0, batch_first=True).to(device)
    ours = same_state(nn.MultiheadAttention(8, 2, batch_first=True).to(device), theirs)
    x = torch.randn(2, 5, 8, device=device)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5, device=device)
    grads = []
    for module in (ours, theirs):
        with runtime.strict():
            y, weights = module(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)
        assert weights is None
        grads.append(torch.autograd.grad(y.square().sum(), list(module.parameters())))
    for actual, expected in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("batched", [True, False])
def test_multihead_attention_with_dropout_is_torchs(batched, device):
    theirs = torch.nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).to(device)
    ours = same_state(nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).to(device), theirs)
    x = torch.randn(*([2] if batched else []), 5, 8, device=device)
    results = []
    for module in (theirs, ours):
        torch.manual_seed(0)
        results.append(module(x, x, x, need_weights=False)[0])
    assert torch.equal(*results)


QUANTIZED = {
    "int4": lambda linear: nn.Int4Linear.from_linear(linear, group_size=32),
    "int4 symmetric": lambda linear: nn.Int4Linear.from_linear(linear, group_size=32, symmetric=True),
    "fp8 row": lambda linear: nn.FP8Linear.from_linear(linear),
    "fp8 tensor": lambda linear: nn.FP8Linear.from_linear(linear, scale="tensor"),
}
EMPTY = {
    "int4": lambda **options: nn.Int4Linear(64, 16, group_size=32, **options),
    "int4 symmetric": lambda **options: nn.Int4Linear(64, 16, group_size=32, **options),
    "fp8 row": lambda **options: nn.FP8Linear(64, 16, **options),
    "fp8 tensor": lambda **options: nn.FP8Linear(64, 16, scale="tensor", **options),
}
each_kind = pytest.mark.parametrize("kind", QUANTIZED)


def quantized(kind, device, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 16, bias=bias).to(device, dtype)
    return linear, QUANTIZED[kind](linear)


def packed_bits(module):
    return {
        name: buffer.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
        for name, buffer in module.named_buffers()
    }


def assert_same_bits(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@each_kind
@pytest.mark.parametrize("bias", [True, False])
def test_quantized_linear_computes_with_its_weight(kind, bias, device):
    linear, layer = quantized(kind, device, bias=bias)
    assert layer.bias is linear.bias
    weight = layer.dequantize(torch.float32)
    error = (weight - linear.weight).norm() / linear.weight.norm()
    assert error < (0.12 if "int4" in kind else 0.04)
    for shape in [(64,), (3, 64), (2, 3, 64), (0, 64)]:
        x = torch.randn(shape, device=device)
        expected = torch.nn.functional.linear(x, weight, linear.bias)
        # fp8 rounds the activations too
        tolerance = 2e-3 if "int4" in kind else 0.15
        torch.testing.assert_close(layer(x), expected, rtol=tolerance, atol=tolerance)


@each_kind
def test_gradients_reach_the_input_and_the_bias_alone(kind, device):
    _, layer = quantized(kind, device)
    x = torch.randn(3, 64, device=device, requires_grad=True)
    layer(x).sum().backward()
    expected = layer.dequantize(torch.float32).sum(0).expand(3, -1)
    torch.testing.assert_close(x.grad, expected, rtol=0.1, atol=0.1)
    torch.testing.assert_close(layer.bias.grad, torch.full((16,), 3.0, device=device))
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


@each_kind
@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.double(),
        lambda m: m.to(torch.float16),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: torch.nn.Sequential(m).half()[0],
        lambda m: m.type(torch.float16),
    ],
)
def test_conversions_touch_the_bias_alone(kind, convert, device):
    _, layer = quantized(kind, device)
    bias, before = layer.bias, packed_bits(layer)
    dtypes = {name: buffer.dtype for name, buffer in layer.named_buffers()}
    converted = convert(layer)
    assert converted is layer
    assert_same_bits(packed_bits(layer), before)
    assert {name: buffer.dtype for name, buffer in layer.named_buffers()} == dtypes
    assert layer.bias is bias
    assert layer.bias.dtype != torch.float32


@each_kind
def test_copies_and_checkpoints_are_bit_for_bit(kind, device):
    _, layer = quantized(kind, device, torch.bfloat16)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = EMPTY[kind](device=device)
    loaded.load_state_dict(torch.load(file))
    assigned = EMPTY[kind](device="meta")
    assigned.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(2, 64, device=device).bfloat16()
    for other in (loaded.to(torch.bfloat16), assigned, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bits(packed_bits(other), packed_bits(layer))
        assert torch.equal(other(x), layer(x))
        assert repr(other) == repr(layer)


@each_kind
def test_a_checkpoint_that_does_not_match_is_refused_with_name_and_shapes(kind, device):
    _, layer = quantized(kind, device)
    model = torch.nn.ModuleDict({"proj": layer})
    before = packed_bits(model)
    name = "qweight" if "int4" in kind else "weight"
    for wrong, message in [
        (getattr(layer, name)[:8], rf"proj\.{name}.*\[8, .*\[16, "),
        (getattr(layer, name).float(), rf"proj\.{name}.*torch\.float32"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(model.state_dict() | {f"proj.{name}": wrong})
        assert_same_bits(packed_bits(model), before)
    with pytest.raises(RuntimeError, match=rf"Missing key.*proj\.{name}"):
        model.load_state_dict({key: value for key, value in model.state_dict().items() if not key.endswith(name)})


def test_int4_linear_refuses_what_it_cannot_hold(device):
    with pytest.raises(ValueError, match=r"group_size must be one of \[32, 64\] for K = 64"):
        nn.Int4Linear(64, 8, group_size=48)
    with pytest.raises(ValueError, match="multiple of 32, got 100"):
        nn.Int4Linear(100, 8, group_size=32)
    with pytest.raises(TypeError, match="weight must be"):
        nn.Int4Linear.from_linear(torch.nn.Linear(64, 8).to(torch.float8_e4m3fn))
    _, layer = quantized("int4", device)
    parts = layer.qweight, layer.scales, layer.offsets
    with pytest.raises(TypeError, match="qweight"):
        nn.Int4Linear.from_packed(parts[0].long(), *parts[1:])
    with pytest.raises(ValueError, match="scales"):
        nn.Int4Linear.from_packed(parts[0], parts[1][:3], parts[2])
    with pytest.raises(ValueError, match="bias"):
        nn.Int4Linear.from_packed(*parts, torch.zeros(3, device=device))
    again = nn.Int4Linear.from_packed(*parts, torch.zeros(16, device=device))
    assert again.qweight is parts[0]
    assert again.group_size == 32


def test_fp8_linear_refuses_what_it_cannot_hold_and_takes_a_static_scale(device):
    with pytest.raises(ValueError, match="scale must be 'row' or 'tensor', got 'block'"):
        nn.FP8Linear(64, 8, scale="block")
    linear, layer = quantized("fp8 row", device)
    with pytest.raises(TypeError, match="weight must have the dtype"):
        nn.FP8Linear.from_packed(layer.weight.float(), layer.weight_scale)
    with pytest.raises(ValueError, match="weight_scale"):
        nn.FP8Linear.from_packed(layer.weight, layer.weight_scale[:3])
    static = nn.FP8Linear.from_packed(layer.weight, layer.weight_scale, torch.tensor(0.01, device=device), linear.bias)
    loaded = nn.FP8Linear(64, 16, device=device)
    loaded.load_state_dict(static.state_dict())
    x = torch.randn(2, 64, device=device)
    assert torch.equal(loaded(x), static(x))
    torch.testing.assert_close(static(x), linear(x), rtol=0.15, atol=0.15)


@each_kind
def test_code_that_reads_the_weight_finds_one(kind, device):
    linear, layer = quantized(kind, device, torch.bfloat16)
    assert layer.weight.shape == linear.weight.shape
    assert layer.weight.device == linear.weight.device
    assert layer.weight.dtype == (torch.bfloat16 if "int4" in kind else torch.float8_e4m3fn)
