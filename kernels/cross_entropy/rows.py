"""The steps that both operators are made of, each as a launch and in PyTorch: count, losses, total, scaling."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fusedops import runtime
from fusedops.runtime.rows import row_grid
from fusedops.runtime.tensors import dtype_name, row_access, unsupported_dtype

from . import ENTRY


class Options(NamedTuple):
    """What the loss of a token depends on besides its logits and its target."""

    ignore_index: int
    label_smoothing: float
    z_loss: float


def covered(operator: str, input: torch.Tensor) -> bool:
    """Whether the kernels run, not PyTorch's versions of them."""
    return runtime.use_kernel(operator, input.device, unsupported_dtype(input, ENTRY.dtypes))


def count_targets(kernel: bool, target: torch.Tensor, ignore_index: int, dtype: torch.dtype) -> torch.Tensor:
    """The number of targets that are not ignored: a scalar on their device."""
    if kernel:
        return _count_kernel(target, ignore_index)
    return (target != ignore_index).sum().to(dtype)


def total_loss(kernel: bool, losses: torch.Tensor, count: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The sum of the losses [rows], over ``count`` if there is one."""
    if kernel:
        return _total_kernel(losses, count, dtype)
    total = losses.sum()
    return (total if count is None else total / count).to(dtype)


def compute_losses(
    kernel: bool,
    logits: torch.Tensor,
    target: torch.Tensor,
    upstream: torch.Tensor | None,
    count: torch.Tensor | None,
    losses: torch.Tensor,
    dlogits: torch.Tensor | None,
    options: Options,
) -> None:
    """Write the losses of logits [..., classes], and the gradient of upstream·loss / count.

    Args:
        kernel: whether the kernel runs.
        logits: any strides.
        target: contiguous, with an element a row.
        upstream: contiguous, an element a row; None for ones.
        count: a scalar; None for 1.
        losses: float32 (float64 for float64 logits), an element a row; written.
        dlogits: as many elements as ``logits``, contiguous; written. It may be ``logits`` itself. None for no gradient.
        options: of the loss.
    """
    if kernel:
        _losses_kernel(logits, target, upstream, count, losses, dlogits, options)
        return
    classes = logits.shape[-1]
    x = logits.reshape(-1, classes).to(losses.dtype)
    t = target.reshape(-1, 1)
    kept, is_class = t != options.ignore_index, (t >= 0) & (t < classes)
    t = torch.where(is_class, t, 0).long()
    smoothing = options.label_smoothing
    largest = x.amax(-1, keepdim=True)
    shifted = x - largest.masked_fill(largest == -torch.inf, 0.0)
    exponential = shifted.exp()
    total = exponential.sum(-1, keepdim=True)
    loss = total.log() - (1 - smoothing) * shifted.gather(1, t)
    lse = total.log() + largest
    if smoothing:
        loss -= smoothing * shifted.mean(-1, keepdim=True)
    if options.z_loss:
        loss += options.z_loss * lse * lse
    loss = loss.masked_fill(~is_class, torch.nan).masked_fill(~kept, 0.0)
    losses.copy_(loss.view_as(losses))
    if dlogits is None:
        return
    slope = (1 + 2 * options.z_loss * lse) / total if options.z_loss else 1 / total
    factor = torch.ones_like(loss) if upstream is None else upstream.reshape(-1, 1).to(x.dtype)
    if count is not None:
        factor = factor / count
    dx = exponential.mul_(slope)
    if smoothing:
        dx -= smoothing / classes
    dx.scatter_add_(1, t, torch.full_like(loss, smoothing) - 1)  # in this order the gradient of one class is exactly 0
    dx.mul_(factor.masked_fill(~is_class, torch.nan)).masked_fill_(~kept, 0.0)
    dlogits.copy_(dx.view(dlogits.shape))


def scale(
    kernel: bool,
    upstream: torch.Tensor,
    dlogits: torch.Tensor,
    target: torch.Tensor,
    count: torch.Tensor | None,
    ignore_index: int,
    in_place: bool,
) -> torch.Tensor:
    """dlogits [..., classes] times the gradient of the loss, a scalar or an element a row, over ``count``.

    Ignored rows are 0 whatever their upstream gradient is. ``in_place``: dlogits itself is multiplied and returned.
    """
    if kernel:
        out = dlogits if in_place else torch.empty_like(dlogits)
        _scale_kernel(dlogits, target, upstream, count, out, ignore_index, in_place)
        return out
    factor = upstream.to(torch.promote_types(dlogits.dtype, torch.float32))
    if count is not None:
        factor = factor / count
    factor = torch.where(target == ignore_index, 0.0, factor).unsqueeze(-1)
    return (dlogits * factor).to(dlogits.dtype)


@runtime.per_signature
def _count_kernel(target, ignore_index):
    from . import kernel

    config = _config("cross_entropy_count", target)
    launch = runtime.prepare(kernel.cross_entropy_count, (1,), target.device, target.numel(), ignore_index, **config)

    def run(target, _):
        count = target.new_empty((), dtype=torch.float32)
        launch(target, count)
        return count

    return run


@runtime.per_signature
def _total_kernel(losses, count, dtype):
    from . import kernel

    config = _config("cross_entropy_total", losses)
    launch = runtime.prepare(kernel.cross_entropy_total, (1,), losses.device, losses.numel(), **config)

    def run(losses, count, dtype):
        total = losses.new_empty((), dtype=dtype)
        launch(losses, count, total)
        return total

    return run


@runtime.per_signature
def _losses_kernel(logits, target, upstream, count, losses, dlogits, options):
    from . import kernel

    rows, classes = target.numel(), logits.shape[-1]
    stride, rows_of = row_access(logits)
    config = _config("cross_entropy_forward", logits, width=classes)
    launch = runtime.prepare(
        kernel.cross_entropy_forward,
        (row_grid(config, rows, runtime.facts(logits.device)),),
        logits.device,
        *(rows, classes, stride, options.ignore_index, options.label_smoothing, options.z_loss),
        SMOOTH=options.label_smoothing != 0,
        ONE_TILE=classes <= config["BLOCK_N"],
        **config,
    )

    def run(logits, target, upstream, count, losses, dlogits, _):
        launch(rows_of(logits), target, upstream, count, losses, dlogits)

    return run


@runtime.per_signature
def _scale_kernel(dlogits, target, upstream, count, out, ignore_index, in_place):
    from . import kernel

    rows, classes = target.numel(), dlogits.shape[-1]
    config = _config("cross_entropy_backward", dlogits, width=classes)
    launch = runtime.prepare(
        kernel.cross_entropy_backward,
        (row_grid(config, rows, runtime.facts(dlogits.device)),),
        dlogits.device,
        *(rows, classes, 1 if upstream.dim() else 0, ignore_index),
        IN_PLACE=in_place,
        **config,
    )

    def run(dlogits, target, upstream, count, out, *_):
        launch(dlogits, target, upstream, count, out)

    return run


def _config(name: str, tensor: torch.Tensor, **bucket: int) -> dict:
    return ENTRY.configs.lookup(name, runtime.facts(tensor.device), dtype_name(tensor), **bucket)
