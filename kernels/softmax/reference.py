"""Softmax and log-softmax in NumPy float64, and their gradients.

With s = x·scale + mask, −inf where a bool mask is False or ``causal`` hides a column:

    softmax: y = exp(s − max(s)) / Σ exp(s − max(s))        ds = y · (dy − Σ y·dy)
    log_softmax: y = s − max(s) − log Σ exp(s − max(s))     ds = dy − exp(y) · Σ dy
    dx = scale · ds, 0 where x is hidden        dmask = ds, summed over the dimensions along which the mask is broadcast
"""

from __future__ import annotations

import numpy as np


def _visible(shape, mask, causal):
    """Where a bool mask and ``causal`` let x through; row i of q sees the columns j ≤ i + k − q."""
    visible = np.ones(shape, dtype=bool)
    if mask is not None and mask.dtype == bool:
        visible = visible & mask
    return visible & np.tri(shape[-2], shape[-1], shape[-1] - shape[-2], dtype=bool) if causal else visible


def _scores(input, scale, mask, causal):
    scores = input * scale
    if mask is not None and mask.dtype != bool:
        scores = scores + mask
    return np.where(_visible(input.shape, mask, causal), scores, -np.inf)


def softmax(input, dim=-1, scale=1.0, mask=None, causal=False):
    """Exponentials along ``dim`` divided by their sum."""
    return np.exp(log_softmax(input, dim, scale, mask, causal))


def softmax_backward(grad_output, input, dim=-1, scale=1.0, mask=None, causal=False):
    """The gradients of ``input`` and of a floating ``mask``."""
    y = softmax(input, dim, scale, mask, causal)
    gradient = y * (grad_output - np.sum(y * grad_output, axis=dim, keepdims=True))
    return _gradients(gradient, input, scale, mask, causal)


def log_softmax(input, dim=-1, scale=1.0, mask=None, causal=False):
    """The logarithm of softmax. A row of −inf, or one with +inf, is NaN."""
    with np.errstate(invalid="ignore", divide="ignore"):
        scores = _scores(input, scale, mask, causal)
        shifted = scores - np.max(scores, axis=dim, keepdims=True, initial=-np.inf)
        return shifted - np.log(np.sum(np.exp(shifted), axis=dim, keepdims=True))


def log_softmax_backward(grad_output, input, dim=-1, scale=1.0, mask=None, causal=False):
    """The gradients of ``input`` and of a floating ``mask``."""
    y = softmax(input, dim, scale, mask, causal)
    gradient = grad_output - y * np.sum(grad_output, axis=dim, keepdims=True)
    return _gradients(gradient, input, scale, mask, causal)


def _gradients(gradient, input, scale, mask, causal):
    gradient = np.where(_visible(input.shape, mask, causal), gradient, 0.0)
    gradients = {"input": gradient * scale}
    if mask is not None and mask.dtype != bool:
        lead = gradient.sum(tuple(range(gradient.ndim - mask.ndim)))
        axes = tuple(axis for axis, size in enumerate(mask.shape) if size == 1)
        gradients["mask"] = lead.sum(axes, keepdims=True)
    return gradients


def softmax_smooth(input, dim=-1, scale=1.0, mask=None, causal=False):
    """:func:`softmax` with 0 in place of the NaN of rows with nothing to see, of which it is the derivative too."""
    return np.nan_to_num(softmax(input, dim, scale, mask, causal), nan=0.0)


def log_softmax_smooth(input, dim=-1, scale=1.0, mask=None, causal=False):
    """:func:`log_softmax` with the hidden scores' −inf left out, and 0 for rows with nothing to see."""
    scores = _scores(input, scale, mask, causal)
    largest = np.max(scores, axis=dim, keepdims=True, initial=-np.inf)
    finite = np.where(np.isfinite(largest), largest, 0.0)
    total = np.sum(np.exp(scores - finite), axis=dim, keepdims=True)
    logarithm = np.log(np.where(total > 0, total, 1.0)) + finite
    return np.where(np.isfinite(scores), scores, 0.0) - logarithm
