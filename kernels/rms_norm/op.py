"""RMSNorm as a PyTorch operator."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from fusedops import runtime
from fusedops.runtime.rows import one_program, partial_sums, row_grid, split_rows
from fusedops.runtime.tensors import (
    as_rows,
    check_affine,
    check_input,
    check_residual,
    dtype_name,
    empty_like,
    row_access,
    unsupported_dtype,
    vector_access,
)

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


def add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`rms_norm` of input + residual, and that sum: a transformer's residual addition and its next norm in one.

    Args:
        input: [..., width], float32, bfloat16 or float16 (others, such as float64, run PyTorch's version).
        residual: the shape, dtype and device of ``input``.
        weight: [width], any floating dtype; None for no scaling.
        eps: added to the mean square, inside the square root.
        weight_offset: added to the weight in float32: 1.0 is Gemma's form.
        cast_before_weight: round to the input's dtype before the weight multiplies, as Llama does.

    Returns:
        (rms_norm(sum), sum), each [..., width]; the sum is rounded to the input's dtype before it is normalised.

    Raises:
        TypeError: a tensor is not floating point, or ``residual`` has another dtype than ``input``.
        ValueError: ``residual`` or ``weight`` does not fit ``input`` in shape or device, or ``input`` has no dimension.
    """
    check_input("add_rms_norm", input)
    check_residual("add_rms_norm", residual, input)
    check_affine("add_rms_norm", "weight", weight, input)
    return _add_forward_op(input, residual, weight, eps, weight_offset, cast_before_weight)[:2]


def rms_norm_eager(input, weight=None, eps=1e-6, weight_offset=0.0, cast_before_weight=False):
    """What a model does without fusedops: PyTorch's function, or the lines of Llama's and Gemma's modules."""
    if not cast_before_weight and weight_offset == 0:
        return F.rms_norm(input, input.shape[-1:], weight, eps)
    x = input.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if cast_before_weight:
        return x.to(input.dtype) if weight is None else (weight_offset + weight) * x.to(input.dtype)
    return (x if weight is None else x * (weight_offset + weight.float())).to(input.dtype)


def add_rms_norm_eager(input, residual, weight=None, eps=1e-6, weight_offset=0.0, cast_before_weight=False):
    """The two lines of a model."""
    total = input + residual
    return rms_norm_eager(total, weight, eps, weight_offset, cast_before_weight), total


def _output_dtype(input: torch.Tensor, weight: torch.Tensor | None, cast_before_weight: bool) -> torch.dtype:
    if weight is None or not cast_before_weight:
        return input.dtype
    return torch.promote_types(input.dtype, weight.dtype)


def _forward(input, weight, eps, weight_offset, cast_before_weight, keep=True):
    if runtime.use_kernel("rms_norm", input.device, unsupported_dtype(input, ENTRY.dtypes)):
        y, _, rstd = _forward_kernel(input, None, weight, eps, weight_offset, cast_before_weight, keep)
        return y, rstd
    return _forward_pytorch(input, weight, eps, weight_offset, cast_before_weight)


def _add_forward(input, residual, weight, eps, weight_offset, cast_before_weight, keep=True):
    if runtime.use_kernel("add_rms_norm", input.device, unsupported_dtype(input, ENTRY.dtypes)):
        return _forward_kernel(input, residual, weight, eps, weight_offset, cast_before_weight, keep)
    total = (input + residual).contiguous()
    y, rstd = _forward_pytorch(total, weight, eps, weight_offset, cast_before_weight)
    return y, total, rstd


@runtime.per_signature
def _forward_kernel(input, residual, weight, eps, weight_offset, cast_before_weight, keep):
    from . import kernel

    y_dtype = _output_dtype(input, weight, cast_before_weight)
    rows, width = as_rows(input).shape
    x_stride, x_of = row_access(input)
    residual_stride, residual_of = (0, lambda residual: None) if residual is None else row_access(residual)
    weight_of = vector_access(weight)
    device = runtime.facts(input.device)
    config = _config("rms_norm_forward", input)
    one_tile = width <= config["BLOCK_N"]
    wide = None if one_tile else _split_config("rms_norm_forward_split", input)
    split = split_rows(wide, rows, width, device) if wide else None
    if wide and split:
        launch = runtime.prepare(
            kernel.rms_norm_forward_split,
            split.grid,
            input.device,
            *(rows, width, split.chunk, split.splits, x_stride, residual_stride, eps, weight_offset),
            CAST_BEFORE_WEIGHT=cast_before_weight,
            SPLITS=1 << (split.splits - 1).bit_length(),
            launch_cooperative_grid=True,
            **{key: value for key, value in wide.items() if key != "PROGRAMS"},
        )
    else:
        launch = runtime.prepare(
            kernel.rms_norm_forward,
            (row_grid(config, rows, device),),
            input.device,
            *(rows, width, x_stride, residual_stride, eps, weight_offset),
            CAST_BEFORE_WEIGHT=cast_before_weight,
            ONE_TILE=one_tile,
            **config,
        )

    def run(input, residual, weight, *_):
        y = empty_like(input, y_dtype)
        total = None if residual is None else empty_like(input, input.dtype)
        rstd = input.new_empty(input.shape[:-1], dtype=torch.float32) if keep else None
        tensors = [x_of(input), residual_of(residual), weight_of(weight), y, total, rstd]
        if split:
            tensors.append(input.new_zeros((rows, 3, split.splits), dtype=torch.int64))
        launch(*tensors)
        return y, total, rstd

    return run


def _forward_pytorch(input, weight, eps, weight_offset, cast_before_weight):
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
    return y.to(_output_dtype(input, weight, cast_before_weight)).contiguous(), rstd.squeeze(-1).contiguous()


def _backward(grad_output, grad_sum, input, weight, rstd, weight_offset, needs_weight_grad):
    if runtime.use_kernel("rms_norm_backward", input.device, unsupported_dtype(input, ENTRY.dtypes)):
        return _backward_kernel(grad_output, grad_sum, input, weight, rstd, weight_offset, needs_weight_grad)
    rstd = rstd.unsqueeze(-1)
    dy, x_hat = grad_output.to(rstd.dtype), input.to(rstd.dtype) * rstd
    g = dy if weight is None else dy * (weight.to(rstd.dtype) + weight_offset)
    dx = rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
    if grad_sum is not None:
        dx = dx + grad_sum.to(dx.dtype)
    dx = dx.to(input.dtype).contiguous()
    return dx, as_rows(dy * x_hat).sum(0).to(weight.dtype) if needs_weight_grad else dx.new_empty(0)


@runtime.per_signature
def _backward_kernel(grad_output, grad_sum, input, weight, rstd, weight_offset, needs_weight_grad):
    from . import backward

    rows, width = as_rows(input).shape
    dy_stride, dy_of = row_access(grad_output)
    x_stride, x_of = row_access(input)
    dsum_stride, dsum_of = (0, lambda dsum: None) if grad_sum is None else row_access(grad_sum)
    weight_of = vector_access(weight)
    device = runtime.facts(input.device)
    config = _config("rms_norm_backward", input)
    one_tile = width <= config["BLOCK_N"]
    wide = None if one_tile else _split_config("rms_norm_backward_split", input)
    split = split_rows(wide, rows, width, device) if wide else None
    strides = (dy_stride, x_stride, dsum_stride)
    if wide and split:
        programs = split.groups
        launch = runtime.prepare(
            backward.rms_norm_backward_split,
            split.grid,
            input.device,
            *(rows, width, split.chunk, split.splits, *strides, weight_offset),
            SPLITS=1 << (split.splits - 1).bit_length(),
            launch_cooperative_grid=True,
            **{key: value for key, value in wide.items() if key != "PROGRAMS"},
        )
    else:
        programs = row_grid(config, rows, device)
        if one_program(rows, width):
            programs = min(programs, 1)
        launch = runtime.prepare(
            backward.rms_norm_backward,
            (programs,),
            input.device,
            *(rows, width, *strides, weight_offset),
            ONE_TILE=one_tile,
            **config,
        )
    add_up = partial_sums(ENTRY, backward.sum_partials, input, programs, width)

    def run(grad_output, grad_sum, input, weight, rstd, *_):
        dx = empty_like(input, input.dtype)
        dw = partials = None
        if needs_weight_grad:
            dw = weight.new_empty(width)
            partials = dw if programs == 1 else dx.new_empty((programs, width), dtype=torch.float32)
        tensors = [dy_of(grad_output), x_of(input), weight_of(weight), rstd, dsum_of(grad_sum), dx, partials]
        if split:
            tensors.append(input.new_zeros((rows, split.splits), dtype=torch.int64))
        launch(*tensors)
        if dw is None:
            return dx, dx.new_empty(0)
        if programs != 1:
            add_up(partials, dw, None)
        return dx, dw

    return run


def _config(name: str, input: torch.Tensor) -> dict:
    width = 1 << (input.shape[-1] - 1).bit_length()  # or 5120 takes the row of 4096, in whose tile it does not fit
    return ENTRY.configs.lookup(name, runtime.facts(input.device), dtype_name(input), width=width)


def _split_config(name: str, input: torch.Tensor) -> dict | None:
    try:
        return _config(name, input)
    except LookupError:
        return None


def _forward_fake(input, weight, eps, weight_offset, cast_before_weight):
    y = input.new_empty(input.shape, dtype=_output_dtype(input, weight, cast_before_weight))
    return y, input.new_empty(input.shape[:-1], dtype=torch.promote_types(input.dtype, torch.float32))


def _add_forward_fake(input, residual, weight, eps, weight_offset, cast_before_weight):
    y, rstd = _forward_fake(input, weight, eps, weight_offset, cast_before_weight)
    return y, input.new_empty(input.shape), rstd


def _backward_fake(grad_output, grad_sum, input, weight, rstd, weight_offset, needs_weight_grad):
    dw = weight.new_empty(weight.shape) if needs_weight_grad else input.new_empty(0)
    return input.new_empty(input.shape), dw


def _setup_context(ctx, inputs, output):
    input, weight, _, ctx.weight_offset, _ = inputs
    ctx.save_for_backward(input, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _autograd(ctx, grad_output, _):
    input, weight, rstd = ctx.saved_tensors
    needs_weight_grad = weight is not None and ctx.needs_input_grad[1]
    dx, dw = _backward_op(grad_output, None, input, weight, rstd, ctx.weight_offset, needs_weight_grad)
    return dx, dw if needs_weight_grad else None, None, None, None


def _add_setup_context(ctx, inputs, output):
    _, _, weight, _, ctx.weight_offset, _ = inputs
    ctx.save_for_backward(output[1], weight, output[2])
    ctx.mark_non_differentiable(output[2])


def _add_autograd(ctx, grad_output, grad_sum, _):
    total, weight, rstd = ctx.saved_tensors
    needs_weight_grad = weight is not None and ctx.needs_input_grad[2]
    if grad_output is None:
        grad_output = torch.zeros_like(rstd).unsqueeze(-1).expand_as(total)
    dx, dw = _backward_op(grad_output, grad_sum, total, weight, rstd, ctx.weight_offset, needs_weight_grad)
    return dx, dx, dw if needs_weight_grad else None, None, None, None


_forward_op = runtime.register(
    "rms_norm(Tensor input, Tensor? weight, float eps, float weight_offset, bool cast_before_weight)"
    " -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
    forward_only=functools.partial(_forward, keep=False),
)
_add_forward_op = runtime.register(
    "add_rms_norm(Tensor input, Tensor residual, Tensor? weight, float eps, float weight_offset,"
    " bool cast_before_weight) -> (Tensor, Tensor, Tensor)",
    _add_forward,
    _add_forward_fake,
    setup_context=_add_setup_context,
    backward=_add_autograd,
    forward_only=functools.partial(_add_forward, keep=False),
)
_backward_op = runtime.register(
    "rms_norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor input, Tensor? weight, Tensor rstd,"
    " float weight_offset, bool needs_weight_grad) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)
