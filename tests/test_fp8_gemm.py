"""fp8 linear beyond what the harness draws: every code, every tie, the edges of float32, strides, errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fusedops import runtime
from fusedops.catalog import check
from fusedops.catalog.fp8_gemm import reference
from fusedops.catalog.fp8_gemm.op import E4M3, fp8_gemm, quantize_fp8

pytestmark = pytest.mark.usefixtures("poisoned")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def codes(tensor):
    return tensor.contiguous().view(torch.uint8).cpu().numpy()


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear_of(values, input_scale, device):
    """Each value through a 1 × 1 layer of weight 1: what it became in e4m3, times the scale."""
    one = torch.ones(1, 1, device=device)
    scale = torch.tensor(input_scale, device=device)
    return fp8_gemm(values.to(device).reshape(-1, 1), one.to(E4M3), one.sum(), scale, out_dtype=torch.float32).flatten()


def problem(m, n, k, device, dtype=torch.float32, per_row=True, bias=True):
    weight, weight_scale = quantize_fp8(normal(n, k, seed=1).to(device) / math.sqrt(k), -1 if per_row else None)
    return {
        "input": normal(m, k, dtype=dtype).to(device),
        "weight": weight,
        "weight_scale": weight_scale,
        "bias": normal(n, dtype=dtype, seed=2).to(device) if bias else None,
    }


def expected(arguments):
    return reference.fp8_gemm(**{name: check.to_numpy(value) for name, value in arguments.items()})


def test_reference_decodes_what_torch_decodes():
    everything = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(reference.decode_e4m3(everything), everything.view(E4M3).double().numpy())
    assert [reference.decode_e4m3(code) for code in (0x01, 0x08, 0x38, 0x7E, 0xFE)] == [2**-9, 2**-6, 1, 448, -448]


def test_every_code_is_multiplied_as_its_value(device):
    everything = torch.arange(256, dtype=torch.uint8, device=device).view(E4M3)
    np.testing.assert_array_equal(linear_of(everything, 1.0, device).cpu(), reference.decode_e4m3(np.arange(256)))


def test_every_value_and_every_tie_rounds_to_nearest_even(device):
    magnitudes = reference.decode_e4m3(np.arange(0x7F)).astype(np.float32)
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    values = np.concatenate([magnitudes, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(448))])
    values = np.concatenate([values, -values])
    # The 448 among them makes the scale 1.
    q, scale = quantize_fp8(torch.from_numpy(values).to(device))
    assert scale == 1
    np.testing.assert_array_equal(codes(q), reference.encode_e4m3(values))
    distance = np.abs(magnitudes[:, None] - np.abs(values)).min(0)
    np.testing.assert_array_equal(np.abs(q.double().cpu().numpy() - values), distance)
    assert not (codes(q)[127 : 127 + 126] & 1).any(), "a tie goes to the even code"
    # Ties of other scales: products with the scale's reciprocal would miss some.
    for factor in (3, 5, 7, 11, 13):
        q, scale = quantize_fp8(torch.from_numpy(np.concatenate([magnitudes, ties]) * np.float32(factor)).to(device))
        assert scale == factor
        np.testing.assert_array_equal(codes(q), reference.encode_e4m3(np.concatenate([magnitudes, ties])))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 1000, 9000])
def test_quantized_bytes_and_scales_are_the_references(device, dtype, width):
    limits = torch.finfo(dtype)
    rows = normal(13, width, dtype=torch.float64)
    rows *= torch.tensor([1, 1e-3, 30, 1e-41, 1e-38, 2e-36, 1e-30, 1e30, 1e38, 0, 1, 1, 1e-45], dtype=torch.float64)[
        :, None
    ]
    rows = rows.clamp(limits.min, limits.max).to(dtype)
    if runtime.interpreting() and dtype == torch.bfloat16:
        rows[rows.abs() < limits.smallest_normal] = 0  # the interpreter misreads bfloat16's subnormal numbers
    rows[10, width // 2] = math.nan
    rows[11, width // 3] = -math.inf
    for tensor, axis in [(rows, -1), (rows[:11], None), (rows[9], None), (rows[:0], -1)]:
        q, scale = quantize_fp8(tensor.to(device), axis)
        q_expected, scale_expected = reference.quantize_fp8(check.to_numpy(tensor), axis)
        assert q.shape == tensor.shape
        assert q.is_contiguous()
        np.testing.assert_array_equal(scale.cpu().numpy(), scale_expected)
        np.testing.assert_array_equal(codes(q), q_expected)


def test_zero_nan_and_infinity(device):
    rows = torch.tensor([[0.0, -0.0, 0.0], [1.0, math.nan, -2.0], [1.0, math.inf, 0.0]], device=device)
    q, scale = quantize_fp8(rows, axis=-1)
    assert scale[0] > 0
    assert codes(q)[0].tolist() == [0, 0x80, 0]
    assert codes(q)[1].tolist() == [0x76, 0x7F, 0xFE]
    assert scale[1] == torch.tensor(2.0) / torch.tensor(448.0)
    assert codes(q)[2].tolist() == [0, 0x7F, 0]
    y = fp8_gemm(rows, torch.ones(5, 3, device=device).to(E4M3), torch.ones((), device=device))
    assert (y[0] == 0).all()
    assert y[1:].isnan().all(), "neither is hidden"


def test_a_static_scale_saturates(device):
    values = torch.tensor([223.9, 224.0, 240.0, 1e30, math.inf, -1e4, -math.inf, math.nan])
    y = linear_of(values, 0.5, device)
    assert y.tolist()[:-1] == [224, 224, 224, 224, 224, -224, -224]
    assert y[-1].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [-1, None])
def test_strides_and_offsets_do_not_change_a_byte(device, dtype, axis):
    tensor = normal(6, 5, 33, dtype=dtype).to(device)
    q, scale = quantize_fp8(tensor, axis)
    offset = torch.zeros(tensor.numel() + 1, dtype=dtype, device=device)[1:].view(tensor.shape).copy_(tensor)
    for same in (*(check.with_layout(tensor, layout) for layout in ("transposed", "sliced")), offset):
        q_same, scale_same = quantize_fp8(same, axis)
        np.testing.assert_array_equal(codes(q_same), codes(q))
        assert torch.equal(scale_same, scale)


def test_strides_and_offsets_of_the_linear_do_not_change_a_bit(device):
    arguments = problem(9, 31, 48, device)
    y = fp8_gemm(**arguments)
    shifted = torch.zeros(31 * 48 + 3, dtype=torch.uint8, device=device)[3:].view(31, 48)
    shifted.copy_(arguments["weight"].view(torch.uint8))
    for weight in (shifted.view(E4M3), check.with_layout(arguments["weight"], "transposed")):
        assert torch.equal(fp8_gemm(**arguments | {"weight": weight}), y)
    sliced = {name: check.with_layout(tensor, "sliced") for name, tensor in arguments.items()}
    assert torch.equal(fp8_gemm(**sliced), y)
    q, scale = quantize_fp8(arguments["input"], -1)
    for layout in ("contiguous", "transposed", "sliced"):
        quantized = {"input": check.with_layout(q, layout), "input_scale": check.with_layout(scale, layout)}
        assert torch.equal(fp8_gemm(**arguments | quantized, out_dtype=torch.float32), y)


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (1, 129, 33), (7, 33, 129), (33, 7, 1000), (129, 65, 16), (3, 5, 0)]
    + [(4000, 33, 80)] * (not runtime.interpreting()),  # thousands of rows have tiles of their own
)
def test_any_size(device, m, n, k, per_row):
    arguments = problem(m, n, k, device, per_row=per_row)
    for bias in (arguments["bias"], None):
        arguments["bias"] = bias
        # Only sm_90's matrix units sum less than float32 exactly.
        tolerance = 1e-6 if device == "cpu" else 5e-4
        assert check.error(fp8_gemm(**arguments), expected(arguments)) < tolerance


@pytest.mark.parametrize("m", [1, 16, 70])
def test_bias_is_added_once(device, m):
    arguments = problem(m, 40, 20, device)
    arguments["weight"] = torch.zeros_like(arguments["weight"].view(torch.uint8)).view(E4M3)
    assert torch.equal(fp8_gemm(**arguments), arguments["bias"].expand(m, 40))


@pytest.mark.parametrize("dtype", DTYPES)
def test_input_that_is_quantized_already(device, dtype):
    arguments = problem(14, 24, 40, device, dtype)
    arguments["input"] = arguments["input"].view(2, 7, 40)
    y = fp8_gemm(**arguments)
    q, scale = quantize_fp8(arguments["input"], -1)
    assert scale.shape == (2, 7)
    quantized = arguments | {"input": q, "input_scale": scale}
    assert torch.equal(fp8_gemm(**quantized, out_dtype=dtype), y)
    assert fp8_gemm(**quantized).dtype == torch.bfloat16
    static = arguments | {"input_scale": quantize_fp8(arguments["input"])[1]}
    q, scale = quantize_fp8(arguments["input"])
    quantized = arguments | {"input": q, "input_scale": scale, "out_dtype": dtype}
    assert torch.equal(fp8_gemm(**quantized), fp8_gemm(**static))


def test_out_dtype_is_the_only_rounding(device):
    arguments = problem(5, 16, 32, device, torch.float16, bias=False)
    exact = fp8_gemm(**arguments, out_dtype=torch.float32)
    assert torch.equal(fp8_gemm(**arguments), exact.half())
    double = fp8_gemm(**arguments | {"input": arguments["input"].double()})
    assert double.dtype == torch.float64
    assert check.error(double, expected(arguments)) < 1e-14


def test_large_activations_and_small_weights_do_not_overflow_on_the_way(device):
    arguments = problem(4, 8, 256, device, bias=False)
    arguments["input"] = arguments["input"] * 1e36
    arguments["weight_scale"] = arguments["weight_scale"] * 1e-3
    assert check.error(fp8_gemm(**arguments), expected(arguments)) < (1e-6 if device == "cpu" else 5e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [(), (5,), (0,), (2, 3, 4)])
def test_gradient_of_any_rank_goes_straight_through(device, dtype, lead):
    arguments = problem(1, 12, 20, device, dtype)
    # Far beyond the static scale: the rounding counts as the identity even where it saturates.
    input = (normal(*lead, 20, dtype=dtype, seed=3) * 100).to(device).requires_grad_()
    bias = arguments["bias"].requires_grad_()
    scale = torch.tensor(0.01, device=device)
    y = fp8_gemm(input, arguments["weight"], arguments["weight_scale"], scale, bias)
    dy = normal(*lead, 1, dtype=dtype, seed=4).to(device).expand(y.shape)
    before = dy.clone()
    dx, db = torch.autograd.grad(y, (input, bias), dy)
    w = check.to_numpy(arguments["weight"]) * check.to_numpy(arguments["weight_scale"])[:, None]
    tolerance = 2 * torch.finfo(dtype).eps
    assert check.error(dx, check.to_numpy(dy) @ w) < tolerance
    assert check.error(db, check.to_numpy(dy).reshape(-1, 12).sum(0)) < tolerance
    assert dx.dtype == db.dtype == dtype
    assert torch.equal(dy, before)


def test_only_the_bias_may_train(device):
    arguments = problem(3, 4, 5, device)
    q, scale = quantize_fp8(arguments["input"])
    bias = arguments["bias"].requires_grad_()
    fp8_gemm(**arguments | {"input": q, "input_scale": scale, "bias": bias}).sum().backward()
    assert (bias.grad == 3).all()
    assert arguments["weight"].grad is None


@pytest.mark.usefixtures("comparable_float8")
@pytest.mark.parametrize("per_row", [True, False])
def test_quantize_is_an_operator_that_compiles(device, per_row):
    tensor = normal(3, 5, 8).to(device)
    torch.library.opcheck(torch.ops.fusedops.quantize_fp8.default, (tensor, per_row))
    axis = -1 if per_row else None
    compiled = torch.compile(quantize_fp8, fullgraph=True, backend="aot_eager")(tensor, axis)
    for ours, eager in zip(compiled, quantize_fp8(tensor, axis), strict=True):
        np.testing.assert_array_equal(codes(ours.reshape(-1)), codes(eager.reshape(-1)))


BAD = {
    "input must be float32, .*float8_e4m3fn, got torch.float8_e5m2": {"input": torch.zeros(3, 8).to(torch.float8_e5m2)},
    "input must be float32, .* got torch.int8": {"input": torch.zeros(3, 8, dtype=torch.int8)},
    r"weight must be float8_e4m3fn .*, got torch.float8_e5m2": {"weight": torch.zeros(4, 8).to(torch.float8_e5m2)},
    "weight must be float8_e4m3fn .*, got torch.bfloat16": {"weight": torch.zeros(4, 8, dtype=torch.bfloat16)},
    "weight_scale must be float32, got torch.float16": {"weight_scale": torch.ones((), dtype=torch.float16)},
    "input_scale must be float32, got torch.float64": {"input_scale": torch.ones((), dtype=torch.float64)},
    "out_dtype must be float32, .* got torch.float8_e4m3fn": {"out_dtype": E4M3},
    "bias must be float32, .* got torch.int32": {"bias": torch.zeros(4, dtype=torch.int32)},
    r"weight must have the shape \[N, K\], got \[32\]": {"weight": torch.zeros(32).to(E4M3)},
    r"input must have the shape \[..., 8\] for this weight, got \[3, 7\]": {"input": torch.zeros(3, 7)},
    r"weight_scale must have the shape \[\] or \[4\], got \[4, 1\]": {"weight_scale": torch.ones(4, 1)},
    r"input_scale must have the shape \[\], got \[3\]": {"input_scale": torch.ones(3)},
    r"input_scale must have the shape \[\] or \[3\], got \[4\]": {
        "input": torch.zeros(3, 8).to(E4M3),
        "input_scale": torch.ones(4),
    },
    "input_scale must be given for float8_e4m3fn input": {"input": torch.zeros(3, 8).to(E4M3)},
    r"bias must have the shape \[4\], got \[3\]": {"bias": torch.zeros(3)},
    "input is on meta, weight on": {"input": torch.zeros(3, 8, device="meta")},
    "weight_scale is on meta, weight on": {"weight_scale": torch.ones((), device="meta")},
    "weight_scale must not require a gradient": {"weight_scale": torch.ones((), requires_grad=True)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_refused(device, message):
    good = {"input": torch.zeros(3, 8), "weight": torch.zeros(4, 8).to(E4M3), "weight_scale": torch.ones(())}
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) and value.device.type != "meta" else value
        for name, value in (good | BAD[message]).items()
    }
    error = TypeError if "got torch." in message else ValueError
    with pytest.raises(error, match=f"fp8_gemm: {message}"):
        fp8_gemm(**arguments)


def test_quantize_refuses_what_it_cannot_do():
    with pytest.raises(TypeError, match=r"quantize_fp8: tensor must be float32, .*got torch.float8_e4m3fn"):
        quantize_fp8(torch.zeros(3).to(E4M3))
    with pytest.raises(ValueError, match=r"quantize_fp8: axis must be None \(one scale\) or -1 \(one a row\), got 0"):
        quantize_fp8(torch.zeros(3, 4), axis=0)
    with pytest.raises(ValueError, match="quantize_fp8: tensor must have at least one dimension"):
        quantize_fp8(torch.zeros(()))
