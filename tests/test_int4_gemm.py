"""The packed layout, the quantizer, and what goes wrong in int4 linears, judged by the float64 reference."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedops import catalog, runtime
from fusedops.catalog import check
from fusedops.catalog.int4_gemm import layout, op, reference
from fusedops.catalog.int4_gemm.op import int4_gemm

ENTRY = catalog.get("int4_gemm")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DOT_DTYPES = [dtype for dtype in DTYPES if not (runtime.interpreting() and dtype == torch.bfloat16)]


def make(lead, n, k, group_size, dtype=torch.float32, device="cpu", bias=True, seed=0):
    """Arguments of int4_gemm; input and bias require gradients."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scales = torch.rand(n, k // group_size, generator=generator) * 0.02 + 0.01
    offsets = -scales * torch.randint(0, 16, scales.shape, generator=generator)
    return {
        "input": torch.randn(*lead, k, generator=generator).to(dtype).to(device).requires_grad_(),
        "qweight": layout.pack(codes).to(device),
        "scales": scales.half().to(device),
        "offsets": offsets.to(device),
        "bias": torch.randn(n, generator=generator).to(dtype).to(device).requires_grad_() if bias else None,
    }


def assert_right(arguments, seed=0):
    failed = [judged for judged in check.judge(ENTRY, ENTRY.operators[0], arguments, seed) if not judged.passed]
    assert not failed


@settings(max_examples=20)
@given(st.integers(0, 5), st.integers(0, 6), st.integers(0, 2**16))
def test_packing_is_as_the_definition_says(n, blocks, seed):
    codes = np.random.default_rng(seed).integers(0, 16, (n, 32 * blocks), dtype=np.uint8)
    packed = layout.pack(torch.from_numpy(codes))
    assert packed.shape == (n, 4 * blocks)
    assert torch.equal(layout.unpack(packed), torch.from_numpy(codes))
    words = packed.numpy().view(np.uint32)
    for row in range(n):
        for k in range(32 * blocks):
            block, element = divmod(k, 32)
            j, c, h = element // 8, element % 8 // 2, element % 2
            assert (words[row, 4 * block + c] >> np.uint32(4 * (j + 4 * h))) & 15 == codes[row, k]


def test_packing_refuses_what_it_cannot_hold():
    with pytest.raises(TypeError, match=r"uint8.*int32"):
        layout.pack(torch.zeros(2, 32, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"multiple of 32, got \[2, 40\]"):
        layout.pack(torch.zeros(2, 40, dtype=torch.uint8))
    with pytest.raises(ValueError, match="got 16"):
        layout.pack(torch.full((2, 32), 16, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"\[2, 5\]"):
        layout.unpack(torch.zeros(2, 5, dtype=torch.int32))


@pytest.mark.usefixtures("poisoned", "no_fallback")
@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("m", [0, 1, 2, 16, 17, 64, 100])
def test_each_path_over_m_is_right_and_adds_the_bias_once(m, dtype, device):
    assert_right(make((m,), 40, 160, 32, dtype, device))
    arguments = make((m,), 33, 64, 64, dtype, device)
    arguments["input"] = torch.zeros_like(arguments["input"])
    assert torch.equal(int4_gemm(**arguments), arguments["bias"].expand(m, -1))


@pytest.mark.usefixtures("poisoned", "no_fallback")
@pytest.mark.parametrize(
    ("n", "k", "group_size"), [(48, 576, 32), (1, 32, 32), (70, 384, 128), (16, 352, 352), (130, 192, 64)]
)
def test_sizes_that_no_tile_divides(n, k, group_size, device):
    assert_right(make((3,), n, k, group_size, torch.float16, device))


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (0, 2)])
def test_gradient_of_any_rank_goes_to_input_and_bias_alone(lead, device):
    arguments = make(lead, 24, 64, 32, device=device)
    arguments["scales"] = arguments["scales"].float().requires_grad_()
    output = int4_gemm(**arguments)
    grad = torch.randn_like(output)
    output.backward(grad)
    values = {name: check.to_numpy(value) for name, value in arguments.items()}
    expected = reference.int4_gemm_backward(check.to_numpy(grad), **values)
    for name, gradient in expected.items():
        assert arguments[name].grad.shape == arguments[name].shape
        np.testing.assert_allclose(check.to_numpy(arguments[name].grad), gradient, rtol=1e-5, atol=1e-5)
    assert arguments["scales"].grad is None


def test_gradcheck_in_float64():
    arguments = make((2,), 5, 32, 32, torch.float64)
    packed = (arguments["qweight"], arguments["scales"], arguments["offsets"])
    torch.autograd.gradcheck(
        lambda x, b: int4_gemm(x, *packed, b), (arguments["input"], arguments["bias"]), fast_mode=True
    )


@pytest.mark.skipif(runtime.interpreting(), reason="bfloat16 and the interpreter")
def test_autocast_is_that_of_linear(device):
    arguments = make((4,), 32, 64, 32, device=device)
    with torch.autocast(device, torch.bfloat16):
        output = int4_gemm(**arguments)
        expected = op.int4_gemm_eager(**arguments)
    assert output.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    output.float().sum().backward()
    assert arguments["input"].grad.dtype == torch.float32


@pytest.mark.skipif(runtime.interpreting() or torch.cuda.is_available(), reason="about the CPU's version")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_converted_weight_follows_changes_and_is_freed(dtype):
    arguments = make((2,), 32, 64, 32, dtype)
    before = len(op._converted)
    with torch.no_grad():
        outputs = [int4_gemm(**arguments)]
        assert len(op._converted) == before + 1
        arguments["scales"].mul_(2)
        outputs.append(int4_gemm(**arguments))
        arguments["qweight"].copy_(arguments["qweight"].flip(0))
        outputs.append(int4_gemm(**arguments))
        arguments["offsets"] = arguments["offsets"] + 1
        outputs.append(int4_gemm(**arguments))
        assert len(op._converted) == before + 1
        expected = op.int4_gemm_eager(**arguments)
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(outputs))
    assert check.error(outputs[-1], check.to_numpy(expected)) <= torch.finfo(dtype).eps
    del arguments
    gc.collect()
    assert len(op._converted) == before


@pytest.mark.skipif(runtime.interpreting() or torch.cuda.is_available(), reason="about the CPU's version")
def test_float32_on_a_cpu_is_linear_with_the_dequantized_weight():
    arguments = make((1, 3), 192, 576, 32)
    weight = layout.dequantize(arguments["qweight"], arguments["scales"], arguments["offsets"])
    with torch.no_grad():
        expected = F.linear(arguments["input"], weight, arguments["bias"])
        for _ in range(2):
            assert torch.equal(int4_gemm(**arguments), expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input": torch.zeros(3, 96)}, ValueError, r"input \[3, 96\] and qweight \[8, 8\]"),
        ({"input": torch.zeros(3, 64, dtype=torch.int32)}, TypeError, "input.*int32"),
        ({"qweight": torch.zeros(8, 8)}, TypeError, "qweight must be int32, got torch.float32"),
        ({"scales": torch.ones(8, 2, dtype=torch.float64)}, TypeError, "scales.*float64"),
        ({"offsets": torch.ones(8, 1)}, ValueError, r"scales \[8, 2\] and offsets \[8, 1\]"),
        ({"scales": torch.ones(7, 2), "offsets": torch.ones(7, 2)}, ValueError, r"N = 8.*\[7, 2\]"),
        ({"scales": torch.ones(8, 3), "offsets": torch.ones(8, 3)}, ValueError, "divides K = 64, got 3"),
        ({"scales": torch.ones(8, 4), "offsets": torch.ones(8, 4)}, ValueError, r"\[32, 64\] for K = 64.*got 16"),
        ({"bias": torch.ones(9)}, ValueError, r"N = 8, got \[9\]"),
        ({"bias": torch.ones(8, dtype=torch.int64)}, TypeError, "bias.*int64"),
        ({"scales": torch.ones(8, 2, device="meta")}, ValueError, "scales is on meta, input on cpu"),
    ],
)
def test_bad_arguments_are_named_with_what_was_given(change, error, message):
    with pytest.raises(error, match=message):
        int4_gemm(**make((3,), 8, 64, 32) | change)


def groups():
    """Rows of one group: ties, constants, one sign, zeros, wide and tiny ranges."""
    steps = st.lists(st.integers(-20, 20), min_size=32, max_size=32)
    constant = st.integers(-20, 20).map(lambda value: [value] * 32)
    one_sign = st.lists(st.integers(1, 40), min_size=32, max_size=32)
    smooth = st.integers(0, 999).map(lambda seed: np.random.default_rng(seed).standard_normal(32).tolist())
    factor = st.sampled_from([1.0, -1.0, 0.37, 3e-8, 1e3])
    return st.tuples(st.one_of(steps, constant, one_sign, smooth), factor).map(lambda t: np.array(t[0]) * t[1])


@settings(max_examples=80)
@given(st.lists(groups(), min_size=1, max_size=4), st.sampled_from(DTYPES), st.booleans())
def test_quantizing_is_close_keeps_zeros_and_is_idempotent(rows, dtype, symmetric):
    weight = torch.from_numpy(np.stack(rows)).to(dtype)
    qweight, scales, offsets = layout.quantize(weight, 32, symmetric)
    assert (scales.dtype, offsets.dtype) == (dtype, torch.float32)
    assert bool((torch.isfinite(scales) & (scales > 0)).all())
    values = reference.weight_of(qweight.numpy(), check.to_numpy(scales), check.to_numpy(offsets))
    # Half a step, and the extremes meet the rounding of the scale 15 times.
    finfo = torch.finfo(dtype)
    rounding = np.maximum(check.to_numpy(scales), finfo.smallest_normal) * (finfo.eps + 1e-5)
    assert (np.abs(values - check.to_numpy(weight)) <= check.to_numpy(scales) / 2 + 16 * rounding).all()
    assert (values[check.to_numpy(weight) == 0] == 0).all()
    # A scale below float16's normal numbers is coarse, and float32 would take a finer one.
    for through in {dtype, torch.float32} if bool((scales >= finfo.smallest_normal).all()) else {dtype}:
        again = layout.quantize(layout.dequantize(qweight, scales, offsets, through), 32, symmetric)
        assert torch.equal(again[0], qweight)
        assert torch.equal(again[1].float(), scales.float())
        assert torch.equal(again[2], offsets)


@pytest.mark.parametrize("value", [0.0, 0.75, -0.75])
def test_constant_groups(value):
    weight = torch.full((2, 64), value)
    for group_size in (32, 64):
        dequantized = layout.dequantize(*layout.quantize(weight, group_size))
        torch.testing.assert_close(dequantized, weight, rtol=1e-5, atol=0)


def test_quantize_refuses_with_the_numbers_and_what_would_work():
    with pytest.raises(ValueError, match=r"one of \[32, 64, 576\] for K = 576.*got 128"):
        layout.quantize(torch.zeros(4, 576), 128)
    with pytest.raises(ValueError, match="multiple of 32, got 40"):
        layout.quantize(torch.zeros(4, 40), 40)
    with pytest.raises(ValueError, match="finite"):
        layout.quantize(torch.full((4, 64), float("nan")), 64)
    with pytest.raises(ValueError, match=r"\[N, K\], got \[64\]"):
        layout.quantize(torch.zeros(64), 64)
    with pytest.raises(TypeError, match=r"got torch\.int8"):
        layout.quantize(torch.zeros(4, 64, dtype=torch.int8), 64)
