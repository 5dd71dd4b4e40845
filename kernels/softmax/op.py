"""Softmax and log-softmax as PyTorch operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fusedops import runtime
from fusedops.runtime.rows import row_grid, split_rows
from fusedops.runtime.tensors import as_rows, dtype_name, empty_like, row_access, unsupported_dtype

from . import ENTRY


def softmax(
    input: torch.Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """exp(s − max(s)) / Σ exp(s − max(s)) along ``dim``, with s = input · scale + mask computed in float32.

    Args:
        input: any shape, float32, bfloat16 or float16 (others, such as float64, run PyTorch's version).
        dim: the dimension that sums to 1; negative counts from the last.
        scale: multiplies the input.
        mask: broadcastable to ``input``, floating (added; its gradient is computed too if it requires one) or bool
            (True to keep). It is not expanded in memory, unless it needs more than three dimensions beside ``dim``.
        causal: row i of the q rows in the second-last dimension sees the columns j ≤ i + k − q of the last one, k wide
            (aligned bottom-right, as flash-attention's); the others are not counted. ``dim`` is the last.

            q = 2, k = 3:  1 1 0        q = 3, k = 2:  0 0
                           1 1 1                       1 0
                                                       1 1

    Returns:
        The shape and dtype of ``input``, contiguous; 0 (−inf for the logarithm) where the input is hidden. A row of
        −inf, or one that is all hidden, is NaN, as in PyTorch; what a bool mask or ``causal`` hides has the gradient 0.

    Raises:
        TypeError: ``input`` is not floating point, or ``mask`` is neither that nor bool.
        IndexError: ``input`` has no dimension ``dim``.
        ValueError: ``mask`` does not fit ``input`` in shape or device, or ``causal`` is asked for along another
            dimension than the last of at least two.
    """
    return _along(input, dim, scale, mask, causal, log=False)


def log_softmax(
    input: torch.Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """s − max(s) − log Σ exp(s − max(s)) along ``dim``; arguments, result and errors as of :func:`softmax`."""
    return _along(input, dim, scale, mask, causal, log=True)


def softmax_eager(input, dim=-1, scale=1.0, mask=None, causal=False):
    """PyTorch's own functions."""
    return torch.softmax(_scores(input, scale, mask, causal), dim).to(input.dtype)


def log_softmax_eager(input, dim=-1, scale=1.0, mask=None, causal=False):
    """PyTorch's own functions."""
    return torch.log_softmax(_scores(input, scale, mask, causal), dim).to(input.dtype)


def _scores(input: torch.Tensor, scale: float, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
    scores = input if scale == 1 else input * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.masked_fill(~_causal(input), -math.inf) if causal else scores


def _causal(input: torch.Tensor) -> torch.Tensor:
    """[q, k], True where a query sees a key."""
    q, k = input.shape[-2:]
    return torch.ones(q, k, dtype=torch.bool, device=input.device).tril(k - q)


def _along(
    input: torch.Tensor, dim: int, scale: float, mask: torch.Tensor | None, causal: bool, log: bool
) -> torch.Tensor:
    name = "log_softmax" if log else "softmax"
    if not input.is_floating_point():
        raise TypeError(f"{name}: input must have a floating-point dtype, got {input.dtype}")
    dims = max(input.dim(), 1)
    if not -dims <= dim < dims:
        raise IndexError(
            f"{name}: dim must be from {-dims} to {dims - 1} for input of shape {list(input.shape)}, got {dim}"
        )
    if mask is not None:
        _check_mask(name, mask, input)
    last = dim % dims == dims - 1
    if causal and (input.dim() < 2 or not last):
        raise ValueError(
            f"{name}: causal needs queries and keys in the last two dimensions and dim=-1, "
            f"got dim={dim} for input of shape {list(input.shape)}"
        )
    if input.dim() == 0:
        return _forward_op(input.reshape(1), mask, scale, causal, log).reshape(())
    if last:
        return _forward_op(input, mask, scale, causal, log)
    if mask is not None:
        mask = mask[(None,) * (dims - mask.dim())].movedim(dim, -1)
    moved = _forward_op(input.movedim(dim, -1), mask, scale, causal, log).movedim(-1, dim)
    return moved.reshape(-1).view(input.shape)  # contiguous() would leave odd strides to dimensions of size 1


def _check_mask(name: str, mask: torch.Tensor, input: torch.Tensor) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name}: mask must have a floating-point dtype or torch.bool, got {mask.dtype}")
    sizes = list(zip(reversed(mask.shape), reversed(input.shape), strict=False))
    if mask.dim() > input.dim() or any(size not in (1, full) for size, full in sizes):
        raise ValueError(
            f"{name}: mask must be broadcastable to input's shape {list(input.shape)}, got {list(mask.shape)}"
        )
    if mask.device != input.device:
        raise ValueError(f"{name}: mask is on {mask.device}, input on {input.device}; put both on one device")


class _MaskAccess(NamedTuple):
    """How the kernels read a mask."""

    scalars: tuple[int, int, int, int, int]  # sizes of dimensions 1 and 2 of three, in which the rows lie; all strides
    columns: bool  # whether it varies along a row
    of: Callable[[Any], Any]  # what to call on it before each launch


def _mask_access(mask: torch.Tensor | None, shape: torch.Size) -> _MaskAccess:
    if mask is None:
        return _MaskAccess((1, 1, 0, 0, 0), False, lambda mask: None)

    def readable(mask):
        if mask.dtype not in (torch.bool, torch.float32, torch.bfloat16, torch.float16):
            mask = mask.float()
        return mask if mask.dim() == 0 or mask.shape[-1] == 1 or mask.stride(-1) in (0, 1) else mask.contiguous()

    def materialised(mask):
        return readable(mask).expand(shape).contiguous()

    of = readable
    full = of(mask).expand(shape)
    dims = _collapsed(shape[:-1], full.stride()[:-1])
    if len(dims) > 3:
        of = materialised
        full = of(mask)
        dims = _collapsed(shape[:-1], full.stride()[:-1])
    (_, stride_0), (size_1, stride_1), (size_2, stride_2) = [(1, 0)] * (3 - len(dims)) + dims
    return _MaskAccess((size_1, size_2, stride_0, stride_1, stride_2), full.stride(-1) != 0, of)


def _collapsed(sizes, strides) -> list[tuple[int, int]]:
    """(size, stride) of as few dimensions as give the same walk."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride
        else:
            dims.append((size, stride))
    return dims


def _forward(input, mask, scale, causal, log):
    if runtime.use_kernel("softmax", input.device, unsupported_dtype(input, ENTRY.dtypes)):
        return _forward_kernel(input, mask, scale, causal, log)
    wide = input if (scale == 1 and mask is None) else input.to(torch.promote_types(input.dtype, torch.float32))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(wide.dtype)
    function = torch.log_softmax if log else torch.softmax
    return function(_scores(wide, scale, mask, causal), -1).to(input.dtype).contiguous()


@runtime.per_signature
def _forward_kernel(input, mask, scale, causal, log):
    from . import kernel

    x_stride, x_of = row_access(input)
    access = _mask_access(mask, input.shape)
    launch, slots = _launcher(
        ("softmax_forward", kernel.softmax_forward, kernel.softmax_forward_split),
        *(input, (x_stride,), access, scale, causal, log),
    )

    def run(input, mask, *_):
        y = empty_like(input, input.dtype)
        tensors = [x_of(input), access.of(mask), y]
        if slots:
            tensors.append(input.new_zeros(slots, dtype=torch.int64))
        launch(*tensors)
        return y

    return run


def _backward(grad_output, output, mask, scale, causal, log, needs_mask_grad):
    """The gradients of the input and, if needed, of a floating mask; only then, or if it is bool, the mask is given."""
    bool_mask = mask if mask is not None and mask.dtype == torch.bool else None
    if not needs_mask_grad:
        dx = _backward_scores(grad_output, output, bool_mask, scale, causal, log, output.dtype)
        return dx, dx.new_empty(0)
    compute = torch.promote_types(output.dtype, torch.float32)
    gradient = _backward_scores(grad_output, output, bool_mask, 1.0, causal, log, compute)
    dmask = gradient.sum_to_size(mask.shape).to(mask.dtype)
    dmask = dmask.clone(memory_format=torch.contiguous_format) if dmask is gradient else dmask.contiguous()
    return gradient.mul_(scale).to(output.dtype), dmask


def _backward_scores(grad_output, output, mask, scale, causal, log, dtype):
    if runtime.use_kernel("softmax_backward", output.device, unsupported_dtype(output, ENTRY.dtypes)):
        return _backward_kernel(grad_output, output, mask, scale, causal, log, dtype)
    compute = torch.promote_types(output.dtype, torch.float32)
    dy, y = grad_output.to(compute), output.to(compute)
    if log:
        dx = dy - y.exp() * dy.sum(-1, keepdim=True)
    else:
        dx = y * (dy - (y * dy).sum(-1, keepdim=True) / y.sum(-1, keepdim=True))
    dx = dx if scale == 1 else dx * scale
    if mask is not None:
        dx = dx.masked_fill(~mask, 0.0)
    if causal:
        dx = dx.masked_fill(~_causal(output), 0.0)
    return dx.to(dtype).contiguous()


@runtime.per_signature
def _backward_kernel(grad_output, output, mask, scale, causal, log, dtype):
    from . import backward

    dy_stride, dy_of = row_access(grad_output)
    y_stride, y_of = row_access(output)
    access = _mask_access(mask, output.shape)
    launch, slots = _launcher(
        ("softmax_backward", backward.softmax_backward, backward.softmax_backward_split),
        *(output, (dy_stride, y_stride), access, scale, causal, log),
    )

    def run(grad_output, output, mask, *_):
        dx = empty_like(output, dtype)
        tensors = [dy_of(grad_output), y_of(output), access.of(mask), dx]
        if slots:
            tensors.append(output.new_zeros(slots, dtype=torch.int64))
        launch(*tensors)
        return dx

    return run


def _launcher(kernels, input, strides, access, scale, causal, log):
    """What to launch: the kernel of whole rows or, for wide ones, that of shared rows, and the shape of its slots."""
    name, whole, shared = kernels
    rows, width = as_rows(input).shape
    device = runtime.facts(input.device)
    common = (*strides, input.shape[-2] if causal else 1, *access.scalars, float(scale))
    options = {"LOG": log, "CAUSAL": causal, "MASK_COLUMNS": access.columns}
    config = _config(name, input)
    one_tile = width <= config["BLOCK_N"]
    if not one_tile and (wide := _split_config(f"{name}_split", input)):
        split = split_rows(wide, rows, width, device)
        if split:
            launch = runtime.prepare(
                shared,
                split.grid,
                input.device,
                *(rows, width, split.chunk, split.splits, *common),
                **options,
                SPLITS=1 << (split.splits - 1).bit_length(),
                launch_cooperative_grid=True,
                **{key: value for key, value in wide.items() if key != "PROGRAMS"},
            )
            return launch, (rows, 2, split.splits)
    grid = (row_grid(config, rows, device),)
    launch = runtime.prepare(whole, grid, input.device, rows, width, *common, **options, ONE_TILE=one_tile, **config)
    return launch, None


def _config(name: str, input: torch.Tensor) -> dict:
    # The power of two from the width on, as the tiles are: a row that fits the next row's tile is not walked.
    width = 1 << max(input.shape[-1] - 1, 0).bit_length()
    return ENTRY.configs.lookup(name, runtime.facts(input.device), dtype_name(input), width=width)


def _split_config(name: str, input: torch.Tensor) -> dict | None:
    try:
        return _config(name, input)
    except LookupError:
        return None


def _forward_fake(input, mask, scale, causal, log):
    return input.new_empty(input.shape)


def _backward_fake(grad_output, output, mask, scale, causal, log, needs_mask_grad):
    return output.new_empty(output.shape), mask.new_empty(mask.shape) if needs_mask_grad else output.new_empty(0)


def _setup_context(ctx, inputs, output):
    _, mask, ctx.scale, ctx.causal, ctx.log = inputs
    ctx.needs_mask_grad = mask is not None and mask.dtype != torch.bool and ctx.needs_input_grad[1]
    keep = mask is not None and (ctx.needs_mask_grad or mask.dtype == torch.bool)
    ctx.save_for_backward(output, mask if keep else None)


def _autograd(ctx, grad_output):
    output, mask = ctx.saved_tensors
    dx, dmask = _backward_op(grad_output, output, mask, ctx.scale, ctx.causal, ctx.log, ctx.needs_mask_grad)
    return dx, dmask if ctx.needs_mask_grad else None, None, None, None


_forward_op = runtime.register(
    "softmax(Tensor input, Tensor? mask, float scale, bool causal, bool log) -> Tensor",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
)
_backward_op = runtime.register(
    "softmax_backward(Tensor grad_output, Tensor output, Tensor? mask, float scale, bool causal, bool log,"
    " bool needs_mask_grad) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)
