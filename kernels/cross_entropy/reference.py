"""Cross-entropy in NumPy float64, with label smoothing and z-loss, and its gradient.

With p = softmax(x), lse = log Σ exp(x), and q = (1 − ε)·onehot(target) + ε/classes (Szegedy et al. 2016, section 7):

    loss = lse − Σ q·x + z · lse²        dx = p · (1 + 2·z·lse) − q

z · lse² is the z-loss (Chowdhery et al., PaLM, 2022, section 5). An ignored token has loss 0 and gradient 0, and
the mean is over the others. ``fused_linear_cross_entropy`` is the same of x = input · weightᵀ + bias.
"""

from __future__ import annotations

import numpy as np


def cross_entropy(input, target, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, reduction="mean"):
    """The loss of logits [..., classes] and targets [...]."""
    kept, onehot, _, lse = _parts(input, target, ignore_index)
    by_target, by_others = (np.where(mask, lse[..., None] - input, 0.0).sum(-1) for mask in (onehot, True))
    loss = (1 - label_smoothing) * by_target + z_loss * lse**2
    if label_smoothing:
        loss = loss + label_smoothing / input.shape[-1] * by_others
    loss = np.where(kept, loss, 0.0)
    if reduction == "none":
        return loss
    with np.errstate(invalid="ignore"):
        return np.asarray(loss.sum() / kept.sum() if reduction == "mean" else loss.sum())


def cross_entropy_backward(
    grad_output, input, target, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, reduction="mean"
):
    """The gradient of ``input``."""
    kept, onehot, p, lse = _parts(input, target, ignore_index)
    q = (1 - label_smoothing) * onehot + label_smoothing / input.shape[-1]
    upstream = grad_output / max(kept.sum(), 1) if reduction == "mean" else grad_output
    dx = (p * (1 + 2 * z_loss * lse[..., None]) - q) * np.broadcast_to(upstream, kept.shape)[..., None]
    return {"input": np.where(kept[..., None], dx, 0.0)}


def fused_linear_cross_entropy(
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
    """The loss of hidden states [..., hidden], weight [classes, hidden], bias [classes]; chunks alter nothing."""
    return cross_entropy(_logits(input, weight, bias), target, ignore_index, label_smoothing, z_loss, reduction)


def fused_linear_cross_entropy_backward(
    grad_output,
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
    """The gradients of ``input``, ``weight`` and ``bias``."""
    options = (ignore_index, label_smoothing, z_loss, reduction)
    dlogits = cross_entropy_backward(grad_output, _logits(input, weight, bias), target, *options)["input"]
    rows = dlogits.reshape(-1, dlogits.shape[-1])
    gradients = {"input": dlogits @ weight, "weight": rows.T @ input.reshape(-1, input.shape[-1])}
    return gradients if bias is None else gradients | {"bias": rows.sum(0)}


def _logits(input, weight, bias):
    return input @ weight.T + (0.0 if bias is None else bias)


def _parts(input, target, ignore_index):
    """Which tokens count, their targets as one-hot rows, the softmax, and the logarithm of its denominator."""
    kept = target != ignore_index
    onehot = np.arange(input.shape[-1]) == target[..., None]
    with np.errstate(invalid="ignore", divide="ignore"):
        largest = input.max(-1, keepdims=True)
        exponential = np.exp(input - largest)
        total = exponential.sum(-1, keepdims=True)
        return kept, onehot, exponential / total, (largest + np.log(total))[..., 0]
