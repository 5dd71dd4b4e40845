"""Softmax and log-softmax as PyTorch operators."""

from __future__ import annotations

import torch

from fusedops import runtime
from fusedops.runtime.tensors import as_rows, dtype_name, unsupported_dtype

from . import ENTRY


def softmax(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """exp(x − max(x)) / Σ exp(x − max(x)) along ``dim``.

    Args:
        input: any shape, float32, bfloat16 or float16 (others, such as float64, run PyTorch's version).
        dim: the dimension that sums to 1; negative counts from the last.

    Returns:
        The shape and dtype of ``input``, contiguous. A row of −inf is NaN, as in PyTorch.

    Raises:
        TypeError: ``input`` is not floating point.
        IndexError: ``input`` has no dimension ``dim``.
    """
    return _along(input, dim, log=False)


def log_softmax(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """x − max(x) − log Σ exp(x − max(x)) along ``dim``; arguments, result and errors as of :func:`softmax`."""
    return _along(input, dim, log=True)


def softmax_eager(input, dim=-1):
    """PyTorch's own function."""
    return torch.softmax(input, dim)


def log_softmax_eager(input, dim=-1):
    """PyTorch's own function."""
    return torch.log_softmax(input, dim)


def _along(input: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    name = "log_softmax" if log else "softmax"
    if not input.is_floating_point():
        raise TypeError(f"{name}: input must have a floating-point dtype, got {input.dtype}")
    dims = max(input.dim(), 1)
    if not -dims <= dim < dims:
        raise IndexError(
            f"{name}: dim must be from {-dims} to {dims - 1} for input of shape {list(input.shape)}, got {dim}"
        )
    if input.dim() == 0:
        return _forward_op(input.reshape(1), log).reshape(())
    if dim % dims == dims - 1:
        return _forward_op(input, log)
    moved = _forward_op(input.movedim(dim, -1), log).movedim(-1, dim)
    return moved.reshape(-1).view(input.shape)  # contiguous() would leave odd strides to dimensions of size 1


def _forward(input, log):
    if not runtime.use_kernel("softmax", input.device, unsupported_dtype(input, ENTRY.dtypes)):
        function = torch.log_softmax if log else torch.softmax
        return function(input, -1).contiguous()

    from . import kernel

    x = as_rows(input)
    rows, width = x.shape
    y = input.new_empty(input.shape)
    config = _config("softmax_forward", x)
    runtime.launch(
        kernel.softmax_forward,
        (-(-rows // config["BLOCK_M"]),),
        x.device,
        x,
        y,
        rows,
        width,
        x.stride(0),
        LOG=log,
        ONE_TILE=width <= config["BLOCK_N"],
        **config,
    )
    return y


def _backward(grad_output, output, log):
    if not runtime.use_kernel("softmax_backward", output.device, unsupported_dtype(output, ENTRY.dtypes)):
        compute = torch.promote_types(output.dtype, torch.float32)
        dy, y = grad_output.to(compute), output.to(compute)
        if log:
            dx = dy - y.exp() * dy.sum(-1, keepdim=True)
        else:
            dx = y * (dy - (y * dy).sum(-1, keepdim=True) / y.sum(-1, keepdim=True))
        return dx.to(output.dtype).contiguous()

    from . import kernel

    y, dy = as_rows(output), as_rows(grad_output)
    rows, width = y.shape
    dx = output.new_empty(output.shape)
    config = _config("softmax_backward", y)
    runtime.launch(
        kernel.softmax_backward,
        (-(-rows // config["BLOCK_M"]),),
        y.device,
        dy,
        y,
        dx,
        rows,
        width,
        dy.stride(0),
        y.stride(0),
        LOG=log,
        ONE_TILE=width <= config["BLOCK_N"],
        **config,
    )
    return dx


def _config(name: str, x: torch.Tensor) -> dict:
    return ENTRY.configs.lookup(name, runtime.facts(x.device), dtype_name(x), width=x.shape[1])


def _forward_fake(input, log):
    return input.new_empty(input.shape)


def _backward_fake(grad_output, output, log):
    return output.new_empty(output.shape)


def _setup_context(ctx, inputs, output):
    _, ctx.log = inputs
    ctx.save_for_backward(output)


def _autograd(ctx, grad_output):
    return _backward_op(grad_output, *ctx.saved_tensors, ctx.log), None


_forward_op = runtime.register(
    "softmax(Tensor input, bool log) -> Tensor",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
)
_backward_op = runtime.register(
    "softmax_backward(Tensor grad_output, Tensor output, bool log) -> Tensor", _backward, _backward_fake
)
