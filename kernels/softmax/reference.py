"""Softmax and log-softmax in NumPy float64, and their gradients.

softmax: y = exp(x − max(x)) / Σ exp(x − max(x))        dx = y · (dy − Σ y·dy)
log_softmax: y = x − max(x) − log Σ exp(x − max(x))     dx = dy − exp(y) · Σ dy
"""

from __future__ import annotations

import numpy as np


def softmax(input, dim=-1):
    """Exponentials along ``dim`` divided by their sum."""
    return np.exp(log_softmax(input, dim))


def softmax_backward(grad_output, input, dim=-1):
    """The gradient of ``input``."""
    y = softmax(input, dim)
    return {"input": y * (grad_output - np.sum(y * grad_output, axis=dim, keepdims=True))}


def log_softmax(input, dim=-1):
    """The logarithm of softmax. A row of −inf, or one with +inf, is NaN."""
    with np.errstate(invalid="ignore", divide="ignore"):
        shifted = input - np.max(input, axis=dim, keepdims=True, initial=-np.inf)
        return shifted - np.log(np.sum(np.exp(shifted), axis=dim, keepdims=True))


def log_softmax_backward(grad_output, input, dim=-1):
    """The gradient of ``input``."""
    return {"input": grad_output - softmax(input, dim) * np.sum(grad_output, axis=dim, keepdims=True)}
