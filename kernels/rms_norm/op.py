"""RMSNorm as a PyTorch operator."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusedops import runtime
from fusedops.runtime.tensors import as_rows, check_affine, check_input, dtype_name, unsupported_dtype

from . import ENTRY


def rms_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
) -> torch.Tensor:
    """Normalise the last dimension by its root mean square (Zhang & Sennrich 2019): x / sqrt(mean(x²) + eps) · w.

    Args:
        input: [..., width], float32, bfloat16 or float16 (others, such as float64, run PyTorch's version).
        weight: [width], any floating dtype; None for no scaling.
        eps: added to the mean square, inside the square root.
        weight_offset: added to the weight in float32: 1.0 is Gemma's form.
        cast_before_weight: round to the input's dtype before the weight multiplies, as Llama does.

    Returns:
        [..., width], in the input's dtype; with ``cast_before_weight`` in the one it has in common with the weight.

    Raises:
        TypeError: ``input`` or ``weight`` is not floating point.
        ValueError: ``weight`` does not fit ``input`` in shape or device, or ``input`` has no dimension.
    """
    check_input("rms_norm", input)
    check_affine("rms_norm", "weight", weight, input)
    return _forward_op(input, weight, eps, weight_offset, cast_before_weight)[0]


def rms_norm_eager(input, weight=None, eps=1e-6, weight_offset=0.0, cast_before_weight=False):
    """What a model does without fusedops: PyTorch's function, or the lines of Llama's and Gemma's modules."""
    if not cast_before_weight and weight_offset == 0:
        return F.rms_norm(input, input.shape[-1:], weight, eps)
    x = input.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if cast_before_weight:
        return x.to(input.dtype) if weight is None else (weight_offset + weight) * x.to(input.dtype)
    return (x if weight is None else x * (weight_offset + weight.float())).to(input.dtype)


def _output_dtype(input: torch.Tensor, weight: torch.Tensor | None, cast_before_weight: bool) -> torch.dtype:
    if weight is None or not cast_before_weight:
        return input.dtype
    return torch.promote_types(input.dtype, weight.dtype)


def _forward(input, weight, eps, weight_offset, cast_before_weight):
    y_dtype = _output_dtype(input, weight, cast_before_weight)
    if not runtime.use_kernel("rms_norm", input.device, unsupported_dtype(input, ENTRY.dtypes)):
        return _forward_pytorch(input, weight, eps, weight_offset, cast_before_weight, y_dtype)

    from . import kernel

    x = as_rows(input)
    rows, width = x.shape
    y = input.new_empty(input.shape, dtype=y_dtype)
    rstd = input.new_empty(input.shape[:-1], dtype=torch.float32)
    config = _config("rms_norm_forward", x)
    runtime.launch(
        kernel.rms_norm_forward,
        (-(-rows // config["BLOCK_M"]),),
        x.device,
        x,
        weight if weight is None else weight.contiguous(),
        y,
        rstd,
        rows,
        width,
        x.stride(0),
        eps,
        weight_offset,
        HAS_WEIGHT=weight is not None,
        CAST_BEFORE_WEIGHT=cast_before_weight,
        ONE_TILE=width <= config["BLOCK_N"],
        **config,
    )
    return y, rstd


def _forward_pytorch(input, weight, eps, weight_offset, cast_before_weight, y_dtype):
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    mean_square = x.pow(2).mean(-1, keepdim=True)
    rstd = torch.rsqrt(mean_square + eps)
    if x.device.type == "cpu":
        fits = ((mean_square > 1e-30) & (mean_square < 1e30)).squeeze(-1)  # or squares leave float32's range
        if not bool(fits.all()):
            wide = torch.rsqrt(x[~fits].double().pow(2).mean(-1, keepdim=True) + eps)
            rstd[~fits] = wide.to(x.dtype)
    y = x * rstd
    if cast_before_weight:
        y = y.to(input.dtype).to(x.dtype)
    if weight is not None:
        y = y * (weight.to(x.dtype) + weight_offset if weight_offset else weight.to(x.dtype))
    return y.to(y_dtype).contiguous(), rstd.squeeze(-1).contiguous()


def _backward(grad_output, input, weight, rstd, weight_offset, needs_weight_grad):
    if not runtime.use_kernel("rms_norm_backward", input.device, unsupported_dtype(input, ENTRY.dtypes)):
        rstd = rstd.unsqueeze(-1)
        dy, x_hat = grad_output.to(rstd.dtype), input.to(rstd.dtype) * rstd
        g = dy if weight is None else dy * (weight.to(rstd.dtype) + weight_offset)
        dx = (rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))).to(input.dtype).contiguous()
        dw = (dy * x_hat).reshape(-1, input.shape[-1]).sum(0).to(weight.dtype) if needs_weight_grad else dx.new_empty(0)
        return dx, dw

    from . import kernel

    x, dy = as_rows(input), as_rows(grad_output)
    rows, width = x.shape
    config = _config("rms_norm_backward", x)
    dx = input.new_empty(input.shape)
    programs = min(-(-rows // config["BLOCK_M"]), runtime.facts(x.device).multiprocessors * 2)
    dw = x.new_empty((programs if needs_weight_grad else 0, width), dtype=torch.float32)
    runtime.launch(
        kernel.rms_norm_backward,
        (programs,),
        x.device,
        dy,
        x,
        weight if weight is None else weight.contiguous(),
        rstd,
        dx,
        dw,
        rows,
        width,
        dy.stride(0),
        x.stride(0),
        weight_offset,
        HAS_WEIGHT=weight is not None,
        WEIGHT_GRAD=needs_weight_grad,
        ONE_TILE=width <= config["BLOCK_N"],
        **config,
    )
    return dx, dw.sum(0).to(weight.dtype) if needs_weight_grad else input.new_empty(0)


def _config(name: str, x: torch.Tensor) -> dict:
    return ENTRY.configs.lookup(name, runtime.facts(x.device), dtype_name(x), width=x.shape[1])


def _forward_fake(input, weight, eps, weight_offset, cast_before_weight):
    y = input.new_empty(input.shape, dtype=_output_dtype(input, weight, cast_before_weight))
    return y, input.new_empty(input.shape[:-1], dtype=torch.promote_types(input.dtype, torch.float32))


def _backward_fake(grad_output, input, weight, rstd, weight_offset, needs_weight_grad):
    dw = weight.new_empty(weight.shape) if needs_weight_grad else input.new_empty(0)
    return input.new_empty(input.shape), dw


def _setup_context(ctx, inputs, output):
    input, weight, _, ctx.weight_offset, _ = inputs
    ctx.save_for_backward(input, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _autograd(ctx, grad_output, _):
    input, weight, rstd = ctx.saved_tensors
    needs_weight_grad = weight is not None and ctx.needs_input_grad[1]
    dx, dw = _backward_op(grad_output, input, weight, rstd, ctx.weight_offset, needs_weight_grad)
    return dx, dw if needs_weight_grad else None, None, None, None


_forward_op = runtime.register(
    "rms_norm(Tensor input, Tensor? weight, float eps, float weight_offset, bool cast_before_weight)"
    " -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
)
_backward_op = runtime.register(
    "rms_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor rstd, float weight_offset,"
    " bool needs_weight_grad) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)
