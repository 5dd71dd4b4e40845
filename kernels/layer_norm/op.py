"""LayerNorm as a PyTorch operator."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusedops import runtime
from fusedops.runtime.tensors import as_rows, check_affine, check_input, dtype_name, unsupported_dtype

from . import ENTRY


def layer_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Normalise the last dimension (Ba, Kiros & Hinton 2016): (x − mean(x)) / sqrt(var(x) + eps) · weight + bias.

    Args:
        input: [..., width], float32, bfloat16 or float16 (others, such as float64, run PyTorch's version).
        weight: [width], any floating dtype; None for no scaling.
        bias: [width], any floating dtype; None for none.
        eps: added to the (biased) variance, inside the square root.

    Returns:
        [..., width], in the input's dtype.

    Raises:
        TypeError: ``input``, ``weight`` or ``bias`` is not floating point.
        ValueError: ``weight`` or ``bias`` does not fit ``input`` in shape or device, or ``input`` has no dimension.
    """
    check_input("layer_norm", input)
    check_affine("layer_norm", "weight", weight, input)
    check_affine("layer_norm", "bias", bias, input)
    return _forward_op(input, weight, bias, eps)[0]


def layer_norm_eager(input, weight=None, bias=None, eps=1e-5):
    """PyTorch's own function, which wants the parameters in the input's dtype."""
    weight, bias = (p if p is None else p.to(input.dtype) for p in (weight, bias))
    return F.layer_norm(input, input.shape[-1:], weight, bias, eps)


def _forward(input, weight, bias, eps):
    if not runtime.use_kernel("layer_norm", input.device, unsupported_dtype(input, ENTRY.dtypes)):
        return _forward_pytorch(input, weight, bias, eps)

    from . import kernel

    x = as_rows(input)
    rows, width = x.shape
    y = input.new_empty(input.shape)
    mean = input.new_empty(input.shape[:-1], dtype=torch.float64)
    rstd = input.new_empty(input.shape[:-1], dtype=torch.float32)
    config = _config("layer_norm_forward", x)
    runtime.launch(
        kernel.layer_norm_forward,
        (-(-rows // config["BLOCK_M"]),),
        x.device,
        x,
        weight if weight is None else weight.contiguous(),
        bias if bias is None else bias.contiguous(),
        y,
        mean,
        rstd,
        rows,
        width,
        x.stride(0),
        eps,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        ONE_TILE=width <= config["BLOCK_N"],
        **config,
    )
    return y, mean, rstd


def _forward_pytorch(input, weight, bias, eps):
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    weight, bias = (p if p is None else p.to(x.dtype) for p in (weight, bias))
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    mean, rstd = mean.squeeze(-1).double(), rstd.squeeze(-1)
    if x.device.type == "cpu":
        # Squares within float32's range, and a spread that float32 tells from the mean; NaN is neither.
        fits = (rstd > 1e-15) & (rstd < 1e15) & (mean.abs() * rstd < 4)
        if not bool(fits.all()):
            rows = x[~fits].double()
            mean[~fits] = rows.mean(-1)
            centred = rows - rows.mean(-1, keepdim=True)
            rstd_rows = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
            rstd[~fits] = rstd_rows.squeeze(-1).to(x.dtype)
            scaled = centred * rstd_rows if weight is None else centred * rstd_rows * weight
            y[~fits] = (scaled if bias is None else scaled + bias).to(x.dtype)
    return y.to(input.dtype).contiguous(), mean.contiguous(), rstd.contiguous()


def _backward(grad_output, input, weight, mean, rstd, needs_weight_grad, needs_bias_grad):
    if not runtime.use_kernel("layer_norm_backward", input.device, unsupported_dtype(input, ENTRY.dtypes)):
        return _backward_pytorch(grad_output, input, weight, mean, rstd, needs_weight_grad, needs_bias_grad)

    from . import kernel

    x, dy = as_rows(input), as_rows(grad_output)
    rows, width = x.shape
    config = _config("layer_norm_backward", x)
    dx = input.new_empty(input.shape)
    programs = min(-(-rows // config["BLOCK_M"]), runtime.facts(x.device).multiprocessors * 2)
    dw = x.new_empty((programs if needs_weight_grad else 0, width), dtype=torch.float32)
    db = x.new_empty((programs if needs_bias_grad else 0, width), dtype=torch.float32)
    runtime.launch(
        kernel.layer_norm_backward,
        (programs,),
        x.device,
        dy,
        x,
        weight if weight is None else weight.contiguous(),
        mean,
        rstd,
        dx,
        dw,
        db,
        rows,
        width,
        dy.stride(0),
        x.stride(0),
        HAS_WEIGHT=weight is not None,
        WEIGHT_GRAD=needs_weight_grad,
        BIAS_GRAD=needs_bias_grad,
        enable_fp_fusion=False,  # dy·w − mean in one rounding leaves the rounding of dy·w where 0 is right (width 1)
        ONE_TILE=width <= config["BLOCK_N"],
        **config,
    )
    return dx, dw.sum(0) if needs_weight_grad else dw.new_empty(0), db.sum(0) if needs_bias_grad else db.new_empty(0)


def _backward_pytorch(grad_output, input, weight, mean, rstd, needs_weight_grad, needs_bias_grad):
    dy, rstd = grad_output.to(rstd.dtype), rstd.unsqueeze(-1)
    exact = mean.unsqueeze(-1)
    mean = exact.to(rstd.dtype)
    x_hat = (input.to(rstd.dtype) - mean - (exact - mean).to(rstd.dtype)) * rstd
    g = dy if weight is None else dy * weight.to(rstd.dtype)
    dx = rstd * (g - g.mean(-1, keepdim=True) - x_hat * (g * x_hat).mean(-1, keepdim=True))
    dw = as_rows(dy * x_hat).sum(0) if needs_weight_grad else rstd.new_empty(0)
    db = as_rows(dy).sum(0) if needs_bias_grad else rstd.new_empty(0)
    return dx.to(input.dtype).contiguous(), dw, db


def _config(name: str, x: torch.Tensor) -> dict:
    return ENTRY.configs.lookup(name, runtime.facts(x.device), dtype_name(x), width=x.shape[1])


def _forward_fake(input, weight, bias, eps):
    mean = input.new_empty(input.shape[:-1], dtype=torch.float64)
    rstd = input.new_empty(input.shape[:-1], dtype=torch.promote_types(input.dtype, torch.float32))
    return input.new_empty(input.shape), mean, rstd


def _backward_fake(grad_output, input, weight, mean, rstd, needs_weight_grad, needs_bias_grad):
    dw = rstd.new_empty(input.shape[-1] if needs_weight_grad else 0)
    return input.new_empty(input.shape), dw, rstd.new_empty(input.shape[-1] if needs_bias_grad else 0)


def _setup_context(ctx, inputs, output):
    input, weight, bias, _ = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(input, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _autograd(ctx, grad_output, *_):
    input, weight, mean, rstd = ctx.saved_tensors
    wants_weight = weight is not None and ctx.needs_input_grad[1]
    wants_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
    dx, dw, db = _backward_op(grad_output, input, weight, mean, rstd, wants_weight, wants_bias)
    return dx, dw.to(weight.dtype) if wants_weight else None, db.to(ctx.bias_dtype) if wants_bias else None, None


_forward_op = runtime.register(
    "layer_norm(Tensor input, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
)
_backward_op = runtime.register(
    "layer_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, Tensor rstd,"
    " bool needs_weight_grad, bool needs_bias_grad) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
