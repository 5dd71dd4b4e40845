"""Cross-entropy, and the linear layer before it, as PyTorch operators.

Where a gradient will be wanted the forward pass computes it, for an upstream gradient of 1, and the backward pass
multiplies: the logits are read once. Liger Kernel (Hsu et al. 2024) does so, and takes the tokens in chunks, so that a
vocabulary's logits never exist as a whole; so do, in other ways, Wijmans et al., Cut Your Losses (2024).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fusedops.runtime import may_reuse, register
from fusedops.runtime.tensors import as_rows, check_input

from .rows import Options, compute_losses, count_targets, covered, scale, total_loss


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """log Σ exp(x) − x[target], with label smoothing as PyTorch has it, plus z_loss · (log Σ exp(x))² (PaLM, 5).

    Args:
        input: logits [..., classes], float32, bfloat16 or float16 (others, such as float64, run PyTorch's version).
        target: [...] int64 or int32: the class of each token.
        ignore_index: tokens with this target have no loss and no gradient, and do not count in the mean.
        label_smoothing: from 0 to 1: how much of each target is spread over all classes.
        z_loss: the weight of the squared logarithm of the softmax's denominator.
        reduction: ``"mean"`` (over the tokens that are not ignored), ``"sum"`` or ``"none"``.

    Returns:
        A scalar, or [...] for ``"none"``, in the input's dtype. The mean of no tokens is NaN, with a gradient of 0.

    Raises:
        TypeError: ``input`` is not floating point, or ``target`` neither int64 nor int32.
        ValueError: shapes or devices differ, or an option is out of its range.
        IndexError: on a CPU: a target is no class. On a GPU, which is not waited for, that token's loss and gradient
            are NaN.
    """
    check_input("cross_entropy", input)
    _check("cross_entropy", input, target, input.shape[-1], label_smoothing, reduction)
    needs_grad = input.requires_grad and torch.is_grad_enabled()
    return _forward_op(input, target, ignore_index, label_smoothing, z_loss, reduction, needs_grad)[0]


def fused_linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """:func:`cross_entropy` of input · weightᵀ + bias, whose logits [tokens, classes] never exist as a whole.

    With ``"none"`` the logits are computed again in the backward pass, which alone knows each token's upstream
    gradient.

    Args:
        input: [..., hidden], float32, bfloat16 or float16 (others, such as float64, run PyTorch's version).
        weight: [classes, hidden], in the input's dtype. One that needs no gradient costs none.
        target: [...] int64 or int32: the class of each token.
        bias: [classes], in the input's dtype.
        ignore_index: tokens with this target have no loss and no gradient, and do not count in the mean.
        label_smoothing: from 0 to 1: how much of each target is spread over all classes.
        z_loss: the weight of the squared logarithm of the softmax's denominator.
        reduction: ``"mean"`` (over the tokens that are not ignored), ``"sum"`` or ``"none"``.
        chunk_tokens: how many tokens' logits exist at a time; None for about as many bytes as ``input`` has.

    Returns:
        A scalar, or [...] for ``"none"``, in the input's dtype.

    Raises:
        TypeError: ``input`` is not floating point, ``target`` neither int64 nor int32, or ``weight`` or ``bias`` has
            another dtype than ``input``.
        ValueError: shapes or devices differ, or an option is out of its range.
        IndexError: on a CPU: a target is no class. On a GPU, which is not waited for, that token's loss is NaN, and so
            are the gradients that it has a part in.
    """
    name = "fused_linear_cross_entropy"
    check_input(name, input)
    _check_linear(name, "weight", weight, input, 2)
    if weight.shape[1] != input.shape[-1]:
        raise ValueError(f"{name}: weight must be [classes, {input.shape[-1]}], got {list(weight.shape)}")
    if bias is not None:
        _check_linear(name, "bias", bias, input, 1)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"{name}: bias must have the shape [{weight.shape[0]}], got {list(bias.shape)}")
    _check(name, input, target, weight.shape[0], label_smoothing, reduction)
    if chunk_tokens is None:
        chunk_tokens = _default_chunk(math.prod(input.shape[:-1]), *weight.shape)
    elif chunk_tokens < 1:
        raise ValueError(f"{name}: chunk_tokens must be at least 1, got {chunk_tokens}")
    needs = [
        tensor is not None and tensor.requires_grad and torch.is_grad_enabled() for tensor in (input, weight, bias)
    ]
    options = (ignore_index, label_smoothing, z_loss, reduction, chunk_tokens)
    return _linear_op(input, weight, target, bias, *options, *needs)[0]


def cross_entropy_eager(input, target, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, reduction="mean"):
    """PyTorch's own function, and what a user of z-loss adds."""
    rows, flat = input.reshape(-1, input.shape[-1]), target.reshape(-1).long()
    loss = F.cross_entropy(rows, flat, None, None, ignore_index, None, reduction, label_smoothing)
    if z_loss:
        squares = (z_loss * torch.logsumexp(rows, -1).square()).masked_fill(flat == ignore_index, 0.0)
        kept = (flat != ignore_index).sum()
        loss = loss + (squares if reduction == "none" else squares.sum() / (kept if reduction == "mean" else 1))
    return loss.view(target.shape) if reduction == "none" else loss


def fused_linear_cross_entropy_eager(
    input,
    weight,
    target,
    bias=None,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    reduction="mean",
    chunk_tokens=None,
):
    """PyTorch's two functions."""
    return cross_entropy_eager(F.linear(input, weight, bias), target, ignore_index, label_smoothing, z_loss, reduction)


def _check(
    name: str, input: torch.Tensor, target: torch.Tensor, classes: int, label_smoothing: float, reduction: str
) -> None:
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: target must be int64 or int32, got {target.dtype}")
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"{name}: target must have the shape {list(input.shape[:-1])} of input without its last dimension, "
            f"got {list(target.shape)}"
        )
    if target.device != input.device:
        raise ValueError(f"{name}: target is on {target.device}, input on {input.device}; put both on one device")
    if classes == 0:
        raise ValueError(f"{name}: there must be at least one class")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{name}: label_smoothing must be from 0 to 1, got {label_smoothing}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{name}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")


def _check_linear(name: str, argument: str, parameter: torch.Tensor, input: torch.Tensor, dims: int) -> None:
    if parameter.dtype != input.dtype:
        raise TypeError(f"{name}: {argument} has dtype {parameter.dtype}, input {input.dtype}; cast to one dtype")
    if parameter.dim() != dims:
        raise ValueError(f"{name}: {argument} must have {dims} dimensions, got the shape {list(parameter.shape)}")
    if parameter.device != input.device:
        raise ValueError(
            f"{name}: {argument} is on {parameter.device}, input on {input.device}; put both on one device"
        )


def _check_targets(target: torch.Tensor, classes: int, ignore_index: int) -> None:
    """On a CPU, where looking costs no synchronisation."""
    if target.device.type != "cpu":
        return
    wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
    if wrong.numel():
        raise IndexError(f"target {int(wrong[0])} is out of bounds: there are {classes} classes")


def _default_chunk(tokens: int, classes: int, hidden: int) -> int:
    """Tokens whose logits take about as much memory as the input: Liger's choice, a power of two."""
    share = -(-tokens // max(-(-classes // max(hidden, 1)), 1))
    return 1 << max(share - 1, 0).bit_length()


def _loss_dtype(input: torch.Tensor) -> torch.dtype:
    return torch.promote_types(input.dtype, torch.float32)


def _folds_count(dtype: torch.dtype) -> bool:
    """Whether a mean's 1/count is in the stored gradient: float16's would vanish before a loss scale could save it."""
    return dtype != torch.float16


def _reduced(kernel, losses, target, count, reduction, dtype):
    if reduction == "none":
        return losses.to(dtype).view(target.shape)
    return total_loss(kernel, losses, count if reduction == "mean" else None, dtype)


def _forward(input, target, ignore_index, label_smoothing, z_loss, reduction, needs_grad):
    _check_targets(target, input.shape[-1], ignore_index)
    kernel = covered("cross_entropy", input)
    target = target.contiguous()
    losses = input.new_empty(target.numel(), dtype=_loss_dtype(input))
    count = losses.new_empty(0)
    if reduction == "mean":
        count = count_targets(kernel, target, ignore_index, losses.dtype)
    dlogits = input.new_empty(input.shape if needs_grad else 0)
    folded = count if reduction == "mean" and _folds_count(input.dtype) else None
    options = Options(ignore_index, label_smoothing, z_loss)
    compute_losses(kernel, input, target, None, folded, losses, dlogits if needs_grad else None, options)
    return _reduced(kernel, losses, target, count, reduction, input.dtype), dlogits, count


def _forward_fake(input, target, ignore_index, label_smoothing, z_loss, reduction, needs_grad):
    loss = input.new_empty(target.shape if reduction == "none" else ())
    count = input.new_empty(() if reduction == "mean" else 0, dtype=_loss_dtype(input))
    return loss, input.new_empty(input.shape if needs_grad else 0), count


def _setup_context(ctx, inputs, output):
    _, target, ctx.ignore_index, _, _, reduction, _ = inputs
    _, dlogits, count = output
    unfolded = reduction == "mean" and not _folds_count(dlogits.dtype)
    ctx.save_for_backward(dlogits, target, count if unfolded else None)
    ctx.mark_non_differentiable(dlogits, count)


def _autograd(ctx, grad_output, *_):
    dlogits, target, count = ctx.saved_tensors
    if may_reuse(grad_output, dlogits, target):
        dx = _scale(grad_output, dlogits, target, count, ctx.ignore_index, in_place=True)
    else:
        dx = _backward_op(_once(grad_output), dlogits, target, count, ctx.ignore_index)
    return dx, None, None, None, None, None, None


def _once(grad_output: torch.Tensor) -> torch.Tensor:
    """The upstream gradient, such that a second derivative is refused: a saved gradient does not show what it is of."""
    if torch.is_grad_enabled() and type(grad_output) is torch.Tensor and not grad_output.requires_grad:
        return grad_output.detach().requires_grad_()
    return grad_output


def _scale(grad_output, dlogits, target, count, ignore_index, in_place=False):
    kernel = covered("cross_entropy_backward", dlogits)
    return scale(kernel, grad_output.contiguous(), dlogits, target.contiguous(), count, ignore_index, in_place)


def _backward_fake(grad_output, dlogits, target, count, ignore_index):
    return torch.empty_like(dlogits)


def _linear_forward(
    input, weight, target, bias, ignore_index, label_smoothing, z_loss, reduction, chunk_tokens, *needs
):
    _check_targets(target, weight.shape[0], ignore_index)
    kernel = covered("fused_linear_cross_entropy", input)
    target = target.contiguous()
    count = input.new_empty(0, dtype=_loss_dtype(input))
    if reduction == "mean":
        count = count_targets(kernel, target, ignore_index, count.dtype)
    if reduction == "none":
        needs = (False, False, False)
    folded = count if reduction == "mean" and _folds_count(input.dtype) else None
    options = Options(ignore_index, label_smoothing, z_loss)
    losses, gradients = _chunks(kernel, input, weight, target, bias, None, folded, options, chunk_tokens, needs)
    return _reduced(kernel, losses, target, count, reduction, input.dtype), *gradients, count


def _chunks(kernel, input, weight, target, bias, upstream, count, options, chunk_tokens, needs):
    """The losses [tokens], and the gradients of input, weight and bias (empty where not needed), chunk by chunk.

    A weight's and a bias's gradient is added up in float32, and stays so for the backward pass to round once: in
    float16 it might leave the range, over all tokens and not yet divided by their number.
    """
    rows, flat = as_rows(input), target.view(-1)
    tokens, classes = rows.shape[0], weight.shape[0]
    losses = rows.new_empty(tokens, dtype=_loss_dtype(input))
    needs_input, needs_weight, needs_bias = needs
    dx = input.new_empty(input.shape if needs_input else 0)
    dw = weight.new_zeros(weight.shape if needs_weight else 0, dtype=losses.dtype)
    db = weight.new_zeros(classes if needs_bias else 0, dtype=losses.dtype)
    buffer = rows.new_empty(min(chunk_tokens, tokens), classes)
    for start in range(0, tokens, chunk_tokens):
        chunk = slice(start, min(start + chunk_tokens, tokens))
        x, logits = rows[chunk], buffer[: chunk.stop - start]
        if bias is None:
            torch.mm(x, weight.t(), out=logits)
        else:
            torch.addmm(bias, x, weight.t(), out=logits)
        shares = None if upstream is None else upstream[chunk]
        compute_losses(
            kernel, logits, flat[chunk], shares, count, losses[chunk], logits if any(needs) else None, options
        )
        if needs_input:
            torch.mm(logits, weight, out=dx.view(rows.shape)[chunk])
        if needs_weight:
            _add_product(dw, logits.t(), x)
        if needs_bias:
            db += logits.sum(0, dtype=db.dtype)
    return losses, (dx, dw, db)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a · b with products and sums in the total's dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif not a.is_cuda or torch.version.hip is not None:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif _adds_to_float32(a.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(a, b, out_dtype=total.dtype)


@functools.cache
def _adds_to_float32(device: torch.device) -> bool:
    """Whether this PyTorch adds a product of narrow matrices to a float32 one; older ones take only a narrow one."""
    a, total = (torch.zeros(16, 16, dtype=dtype, device=device) for dtype in (torch.float16, torch.float32))
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _linear_fake(input, weight, target, bias, ignore_index, label_smoothing, z_loss, reduction, chunk_tokens, *needs):
    loss = input.new_empty(target.shape if reduction == "none" else ())
    if reduction == "none":
        needs = (False, False, False)
    gradients = _gradients_fake(input, weight, needs, _loss_dtype(input))
    return loss, *gradients, input.new_empty(() if reduction == "mean" else 0, dtype=_loss_dtype(input))


def _gradients_fake(input, weight, needs, dtype):
    return (
        input.new_empty(input.shape if needs[0] else 0),
        weight.new_empty(weight.shape if needs[1] else 0, dtype=dtype),
        weight.new_empty(weight.shape[0] if needs[2] else 0, dtype=dtype),
    )


def _linear_setup_context(ctx, inputs, output):
    input, weight, target, bias, *ctx.options = inputs
    _, dx, dw, db, count = output
    ctx.recompute = ctx.options[3] == "none"
    if ctx.recompute:
        ctx.save_for_backward(input, weight, target, bias)
    else:
        unfolded = ctx.options[3] == "mean" and not _folds_count(input.dtype)
        ctx.save_for_backward(dx, dw, db, count if unfolded else None)
    ctx.dtype = input.dtype
    ctx.mark_non_differentiable(dx, dw, db, count)


def _linear_autograd(ctx, grad_output, *_):
    options, needs = ctx.options[:5], ctx.options[5:]
    if ctx.recompute:
        input, weight, target, bias = ctx.saved_tensors
        gradients = _recompute_op(grad_output, input, weight, target, bias, *options[:3], options[4], *needs)
    else:
        *gradients, count = ctx.saved_tensors
        scaled: Callable[..., torch.Tensor] = functools.partial(_linear_scale, in_place=True)
        if not may_reuse(grad_output, *gradients):
            scaled, grad_output = _linear_scale_op, _once(grad_output)
        gradients = [
            needed and scaled(grad_output, one, count, ctx.dtype) for needed, one in zip(needs, gradients, strict=True)
        ]
    dx, dw, db = (one if needed else None for needed, one in zip(needs, gradients, strict=True))
    return dx, dw, None, db, *(None,) * 8


def _linear_scale(grad_output, gradient, count, dtype, in_place=False):
    if count is None and gradient.dtype == dtype:
        return gradient.mul_(grad_output) if in_place else gradient * grad_output
    factor = grad_output.to(torch.promote_types(dtype, torch.float32))
    if count is not None:
        factor = factor / count.clamp(min=1)
    # The factor has a dimension, or PyTorch would round it to the gradient's dtype.
    return torch.mul(gradient, factor.view(1), out=gradient.new_empty(gradient.shape, dtype=dtype))


def _linear_scale_fake(grad_output, gradient, count, dtype):
    return gradient.new_empty(gradient.shape, dtype=dtype)


def _recompute(grad_output, input, weight, target, bias, ignore_index, label_smoothing, z_loss, chunk_tokens, *needs):
    kernel = covered("fused_linear_cross_entropy_backward", input)
    options = Options(ignore_index, label_smoothing, z_loss)
    upstream = grad_output.reshape(-1).contiguous()
    _, (dx, dw, db) = _chunks(
        *(kernel, input, weight, target.contiguous(), bias, upstream, None, options, chunk_tokens, needs)
    )
    return dx, dw.to(input.dtype), db.to(input.dtype)


def _recompute_fake(
    grad_output, input, weight, target, bias, ignore_index, label_smoothing, z_loss, chunk_tokens, *needs
):
    return _gradients_fake(input, weight, needs, input.dtype)


_forward_op = register(
    "cross_entropy(Tensor input, Tensor target, int ignore_index, float label_smoothing, float z_loss, str reduction,"
    " bool needs_grad) -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
)
_backward_op = register(
    "cross_entropy_backward(Tensor grad_output, Tensor dlogits, Tensor target, Tensor? count, int ignore_index)"
    " -> Tensor",
    _scale,
    _backward_fake,
)
_linear_op = register(
    "fused_linear_cross_entropy(Tensor input, Tensor weight, Tensor target, Tensor? bias, int ignore_index,"
    " float label_smoothing, float z_loss, str reduction, int chunk_tokens, bool input_grad, bool weight_grad,"
    " bool bias_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _linear_forward,
    _linear_fake,
    setup_context=_linear_setup_context,
    backward=_linear_autograd,
)
_linear_scale_op = register(
    "fused_linear_cross_entropy_scale_backward(Tensor grad_output, Tensor gradient, Tensor? count, ScalarType dtype)"
    " -> Tensor",
    _linear_scale,
    _linear_scale_fake,
)
_recompute_op = register(
    "fused_linear_cross_entropy_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor target, Tensor? bias,"
    " int ignore_index, float label_smoothing, float z_loss, int chunk_tokens, bool input_grad, bool weight_grad,"
    " bool bias_grad) -> (Tensor, Tensor, Tensor)",
    _recompute,
    _recompute_fake,
)
