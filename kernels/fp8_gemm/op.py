"""fp8 linear as a PyTorch operator, and the quantization of tensors to e4m3."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fusedops import runtime

from . import ENTRY

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal


def fp8_gemm(
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply e4m3 activations by e4m3 weights: y = q(x) · (weight · weight_scale)ᵀ + bias.

    Activations in a wider dtype are rounded as :func:`quantize_fp8` does it: with a scale a row or, where
    ``input_scale`` is given, with that one scale; then what lies beyond 448 · ``input_scale`` saturates. The products
    are summed in float32; the scales and the bias follow the sum. The gradient goes to ``input``, straight through the
    rounding (dx = dy · weight · weight_scale), and to ``bias``.

    Args:
        input: [..., K], float8_e4m3fn, float32, bfloat16 or float16 (others, such as float64, run PyTorch's version).
        weight: [N, K], float8_e4m3fn.
        weight_scale: float32, [] or [N]: a weight is its e4m3 number times this.
        input_scale: float32. Of float8 input: [] or [...], and required. Else [], or None for dynamic scales.
        bias: [N], any floating dtype.
        out_dtype: of the result; ``input``'s when None, and bfloat16 for float8 input.

    Returns:
        [..., N] in ``out_dtype``. A row with a NaN or an infinity is NaN where the scales are dynamic.

    Raises:
        TypeError: a dtype is not one of these.
        ValueError: shapes or devices do not fit, ``input_scale`` is missing, or a scale requires a gradient.
    """
    if out_dtype is None:
        out_dtype = torch.bfloat16 if input.dtype == E4M3 else input.dtype
    _check(input, weight, weight_scale, input_scale, bias, out_dtype)
    return _forward_op(input, weight, weight_scale, input_scale, bias, out_dtype)


def quantize_fp8(tensor: torch.Tensor, axis: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to e4m3 with one scale, or one a row: q = e4m3(tensor / scale), scale = max|tensor| / 448 in float32.

    To nearest, ties to even; the same bytes on every device. A scale is at least 2^-126, so a row of zeros has a finite
    one. NaN stays NaN and leaves its row's scale alone. Infinity makes the scale infinite: it becomes NaN, the finite
    values beside it 0.

    Args:
        tensor: [..., K], float32, bfloat16 or float16 (others, such as float64, are rounded to float32 first).
        axis: None for one scale, -1 for one a row of the last dimension.

    Returns:
        float8_e4m3fn of the tensor's shape, and the float32 scale: [] or [...].

    Raises:
        TypeError: ``tensor`` is not floating point, or is float8 already.
        ValueError: ``tensor`` has no dimension, or ``axis`` is another one.
    """
    if not _is_wide(tensor.dtype):
        raise TypeError(f"quantize_fp8: tensor must be float32, bfloat16, float16 or float64, got {tensor.dtype}")
    if tensor.dim() == 0:
        raise ValueError("quantize_fp8: tensor must have at least one dimension, got a scalar")
    if axis not in (None, -1, tensor.dim() - 1):
        raise ValueError(f"quantize_fp8: axis must be None (one scale) or -1 (one a row), got {axis}")
    return _quantize_op(tensor.detach(), axis is not None)


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _check(input, weight, weight_scale, input_scale, bias, out_dtype):
    if input.dtype != E4M3 and not _is_wide(input.dtype):
        raise TypeError(
            f"fp8_gemm: input must be float32, bfloat16, float16, float64 or float8_e4m3fn, got {input.dtype}"
        )
    if weight.dtype != E4M3:
        raise TypeError(f"fp8_gemm: weight must be float8_e4m3fn (quantize_fp8 makes it), got {weight.dtype}")
    if not _is_wide(out_dtype):
        raise TypeError(f"fp8_gemm: out_dtype must be float32, bfloat16, float16 or float64, got {out_dtype}")
    if weight.dim() != 2:
        raise ValueError(f"fp8_gemm: weight must have the shape [N, K], got {list(weight.shape)}")
    n, k = weight.shape
    if input.dim() == 0 or input.shape[-1] != k:
        raise ValueError(f"fp8_gemm: input must have the shape [..., {k}] for this weight, got {list(input.shape)}")
    _check_scale("weight_scale", weight_scale, weight, (n,))
    if input_scale is not None:
        _check_scale("input_scale", input_scale, weight, input.shape[:-1] if input.dtype == E4M3 else ())
    elif input.dtype == E4M3:
        raise ValueError("fp8_gemm: input_scale must be given for float8_e4m3fn input, got None")
    if bias is not None:
        if not _is_wide(bias.dtype):
            raise TypeError(f"fp8_gemm: bias must be float32, bfloat16, float16 or float64, got {bias.dtype}")
        if bias.shape != (n,):
            raise ValueError(f"fp8_gemm: bias must have the shape [{n}], got {list(bias.shape)}")
    for name, tensor in (("input", input), ("bias", bias)):
        if tensor is not None and tensor.device != weight.device:
            raise ValueError(
                f"fp8_gemm: {name} is on {tensor.device}, weight on {weight.device}; put both on one device"
            )


def _check_scale(name, scale, weight, rows):
    if scale.dtype != torch.float32:
        raise TypeError(f"fp8_gemm: {name} must be float32, got {scale.dtype}")
    if scale.dim() and scale.shape != rows:
        accepted = f"[] or {list(rows)}" if rows else "[]"
        raise ValueError(f"fp8_gemm: {name} must have the shape {accepted}, got {list(scale.shape)}")
    if scale.device != weight.device:
        raise ValueError(f"fp8_gemm: {name} is on {scale.device}, weight on {weight.device}; put both on one device")
    if scale.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"fp8_gemm: {name} must not require a gradient, there is none for scales; detach it")


def _unsupported(what: str, dtype: torch.dtype) -> str | None:
    name = str(dtype).removeprefix("torch.")
    return None if name in ENTRY.dtypes else f"{what} has dtype {name}, the kernel takes {', '.join(ENTRY.dtypes)}"


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., K] as [rows, K] with unit stride along K; copies only where no view is possible."""
    rows = tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _config(name: str, dtype: torch.dtype, device: torch.device, **bucket: int) -> dict:
    return ENTRY.configs.lookup(name, runtime.facts(device), str(dtype).removeprefix("torch."), **bucket)


def _quantize(tensor, per_row):
    scale = None if per_row else _scale(tensor.float().reshape(-1))
    q, scale = _quantize_rows(_rows(tensor), scale)
    return q.reshape(tensor.shape), scale.reshape(tensor.shape[:-1]) if per_row else scale


def _scale(x):
    """[..., K] → [...]. The divisor is a tensor because CUDA multiplies by the reciprocal of a number."""
    if x.shape[-1] == 0:
        return x.new_full(x.shape[:-1], SMALLEST_SCALE)
    largest = x.abs().nan_to_num(0.0, math.inf).amax(-1)
    return (largest / torch.full_like(largest, LARGEST)).clamp_min(SMALLEST_SCALE)


def _quantize_rows(x, scale):
    """x [rows, K] → e4m3 [rows, K] and its scale: [] the given one, or [rows] where ``scale`` is None."""
    if not runtime.use_kernel("quantize_fp8", x.device, _unsupported("tensor", x.dtype)):
        x = x.float()
        scale = _scale(x) if scale is None else scale
        y = x / scale.reshape(-1, 1)
        # Older casts to float8 do not saturate; the sign of a NaN is the processor's choice.
        return torch.where(y.isnan(), torch.nan, y.clamp(-LARGEST, LARGEST)).to(E4M3), scale

    from . import kernel

    rows, width = x.shape
    dynamic = scale is None
    if dynamic:
        scale = x.new_empty(rows, dtype=torch.float32)
    q = x.new_empty((rows, width), dtype=torch.uint8)
    config = _config("quantize_rows", x.dtype, x.device, width=width)
    runtime.launch(
        kernel.quantize_rows,
        (-(-rows // config["BLOCK_M"]),),
        x.device,
        x,
        q,
        scale,
        rows,
        width,
        x.stride(0),
        DYNAMIC=dynamic,
        ONE_TILE=dynamic and width <= config["BLOCK_N"],
        **config,
    )
    return q.view(E4M3), scale


def _forward(input, weight, weight_scale, input_scale, bias, out_dtype):
    a = _rows(input)
    if input.dtype == E4M3:
        a_scale = input_scale.reshape(-1) if input_scale.dim() else input_scale
    else:
        a, a_scale = _quantize_rows(a, input_scale)
    if not runtime.use_kernel("fp8_gemm", input.device, _unsupported("the output", out_dtype)):
        compute = torch.promote_types(out_dtype, torch.float32)
        y = F.linear(a.to(compute), weight.to(compute)) * weight_scale * a_scale.reshape(-1, 1)
        y = (y if bias is None else y + bias).to(out_dtype)
        return y.reshape(*input.shape[:-1], weight.shape[0])

    from . import kernel

    b = weight if weight.stride(1) == 1 else weight.contiguous()
    (m, k), n = a.shape, b.shape[0]
    y = input.new_empty((*input.shape[:-1], n), dtype=out_dtype)
    # By powers of two, so that not every length of a sequence becomes a key of the table's cache.
    config = _config("fp8_gemm", out_dtype, input.device, m=1 << (m - 1).bit_length())
    runtime.launch(
        kernel.fp8_gemm,
        (-(-m // config["BLOCK_M"]) * -(-n // config["BLOCK_N"]),),
        input.device,
        a.view(torch.uint8),
        b.view(torch.uint8),
        y,
        a_scale,
        weight_scale,
        bias if bias is None else bias.contiguous(),
        m,
        n,
        k,
        a.stride(0),
        b.stride(0),
        a_scale.stride(0) if a_scale.dim() else 0,
        weight_scale.stride(0) if weight_scale.dim() else 0,
        HAS_BIAS=bias is not None,
        **config,
    )
    return y


def _backward(grad_output, weight, weight_scale, input_dtype):
    """dx = dy · (weight · weight_scale) by PyTorch, on every device.

    Decoding the weight costs 3·N·K bytes of traffic, little beside a training step's product, for which the vendor's
    library is hard to beat. On a GPU the weight is rounded to dy's dtype, as an unquantized layer's is.
    """
    compute = grad_output.dtype if grad_output.is_cuda else torch.promote_types(grad_output.dtype, torch.float32)
    w = weight.to(compute).mul_(weight_scale.reshape(-1, 1))
    dx = grad_output.to(compute).reshape(math.prod(grad_output.shape[:-1]), weight.shape[0]) @ w
    return dx.to(input_dtype).reshape(*grad_output.shape[:-1], weight.shape[1])


def _forward_fake(input, weight, weight_scale, input_scale, bias, out_dtype):
    return input.new_empty((*input.shape[:-1], weight.shape[0]), dtype=out_dtype)


def _backward_fake(grad_output, weight, weight_scale, input_dtype):
    return grad_output.new_empty((*grad_output.shape[:-1], weight.shape[1]), dtype=input_dtype)


def _quantize_fake(tensor, per_row):
    scale_shape = tensor.shape[:-1] if per_row else ()
    return tensor.new_empty(tensor.shape, dtype=E4M3), tensor.new_empty(scale_shape, dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    input, weight, weight_scale, _, bias, _ = inputs
    ctx.save_for_backward(weight, weight_scale)
    ctx.input_dtype = input.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _autograd(ctx, grad_output):
    weight, weight_scale = ctx.saved_tensors
    dx = db = None
    if ctx.needs_input_grad[0]:
        dx = _backward_op(grad_output, weight, weight_scale, ctx.input_dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[4]:
        rows = grad_output.reshape(math.prod(grad_output.shape[:-1]), weight.shape[0])
        db = rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)).to(ctx.bias_dtype)
    return dx, None, None, None, db, None


_forward_op = runtime.register(
    "fp8_gemm(Tensor input, Tensor weight, Tensor weight_scale, Tensor? input_scale, Tensor? bias,"
    " ScalarType out_dtype) -> Tensor",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
)
_backward_op = runtime.register(
    "fp8_gemm_backward(Tensor grad_output, Tensor weight, Tensor weight_scale, ScalarType input_dtype) -> Tensor",
    _backward,
    _backward_fake,
)
_quantize_op = runtime.register(
    "quantize_fp8(Tensor tensor, bool per_row) -> (Tensor, Tensor)", _quantize, _quantize_fake
)
