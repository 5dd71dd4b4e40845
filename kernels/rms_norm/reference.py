"""RMSNorm in NumPy float64 (Zhang & Sennrich 2019, equation 4), and its gradient.

    y = x / sqrt(mean(x²) + eps) · (weight_offset + w)

With r = 1 / sqrt(mean(x²) + eps), x̂ = x·r and g = dy·(weight_offset + w):

    dx = r · (g − x̂ · mean(g·x̂))        dw = Σ_rows dy·x̂

``add_rms_norm`` is the same of x = input + residual, which it returns too: its gradient adds to dx, and both summands
have the gradient of the sum.
"""

from __future__ import annotations

import numpy as np


def rms_norm(input, weight=None, eps=1e-6, weight_offset=0.0, cast_before_weight=False):
    """Normalise the last dimension of ``input`` [..., width]; ``cast_before_weight`` is about rounding, of which there
    is none here.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        x_hat = input / np.sqrt(np.mean(input**2, axis=-1, keepdims=True) + eps)
    return x_hat if weight is None else x_hat * (weight_offset + weight)


def rms_norm_backward(grad_output, input, weight=None, eps=1e-6, weight_offset=0.0, cast_before_weight=False):
    """The gradients of ``input`` and ``weight``."""
    r = 1 / np.sqrt(np.mean(input**2, axis=-1, keepdims=True) + eps)
    x_hat = input * r
    g = grad_output if weight is None else grad_output * (weight_offset + weight)
    gradients = {"input": r * (g - x_hat * np.mean(g * x_hat, axis=-1, keepdims=True))}
    if weight is not None:
        gradients["weight"] = (grad_output * x_hat).sum(tuple(range(input.ndim - 1)))
    return gradients


def add_rms_norm(input, residual, weight=None, eps=1e-6, weight_offset=0.0, cast_before_weight=False):
    """(rms_norm(input + residual), input + residual)."""
    return rms_norm(input + residual, weight, eps, weight_offset), input + residual


def add_rms_norm_backward(
    grad_output, input, residual, weight=None, eps=1e-6, weight_offset=0.0, cast_before_weight=False
):
    """The gradients of ``input``, ``residual`` and ``weight``; ``grad_output`` is a pair."""
    gradients = rms_norm_backward(grad_output[0], input + residual, weight, eps, weight_offset)
    dx = gradients["input"] + grad_output[1]
    return gradients | {"input": dx, "residual": dx}
