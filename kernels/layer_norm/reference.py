"""LayerNorm in NumPy float64 (Ba, Kiros & Hinton 2016, equation 4), and its gradient.

    y = (x − mean(x)) / sqrt(var(x) + eps) · w + b

With r = 1 / sqrt(var(x) + eps), x̂ = (x − mean(x))·r and g = dy·w:

    dx = r · (g − mean(g) − x̂ · mean(g·x̂))        dw = Σ_rows dy·x̂        db = Σ_rows dy
"""

from __future__ import annotations

import numpy as np


def layer_norm(input, weight=None, bias=None, eps=1e-5):
    """Normalise the last dimension of ``input`` [..., width]."""
    y = normalized(input, eps)[0]
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def layer_norm_backward(grad_output, input, weight=None, bias=None, eps=1e-5):
    """The gradients of ``input``, ``weight`` and ``bias``."""
    x_hat, r = normalized(input, eps)
    g = grad_output if weight is None else grad_output * weight
    rows = tuple(range(input.ndim - 1))
    mean_g = np.mean(g, axis=-1, keepdims=True)
    gradients = {"input": r * (g - mean_g - x_hat * np.mean(g * x_hat, axis=-1, keepdims=True))}
    if weight is not None:
        gradients["weight"] = (grad_output * x_hat).sum(rows)
    if bias is not None:
        gradients["bias"] = grad_output.sum(rows)
    return gradients


def normalized(input, eps):
    """x̂ and r; the variance is taken of what is left after the mean, never as mean(x²) − mean(x)²."""
    centred = input - np.mean(input, axis=-1, keepdims=True)
    r = 1 / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + eps)
    return centred * r, r
