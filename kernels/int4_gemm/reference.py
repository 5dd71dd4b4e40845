"""The int4 linear in NumPy float64, and its gradient.

With q the codes that layout.py packs (nibble j + 4·h of word c holds element 8·j + 2·c + h of its block of 32):

    W[n, k] = scales[n, k // g] · q[n, k] + offsets[n, k // g]        y = x · Wᵀ + bias
    dx = dy · W        dbias = Σ_rows dy
"""

from __future__ import annotations

import numpy as np


def weight_of(qweight, scales, offsets):
    """W [N, K]."""
    n, k = qweight.shape[0], qweight.shape[1] * 8
    codes = np.empty((n, k))
    for column in range(k):
        block, element = divmod(column, 32)
        j, c, h = element // 8, element % 8 // 2, element % 2
        codes[:, column] = (qweight[:, 4 * block + c] >> 4 * (j + 4 * h)) & 15
    group = np.arange(k) // (k // scales.shape[1])
    return scales[:, group] * codes + offsets[:, group]


def int4_gemm(input, qweight, scales, offsets, bias=None):
    """``input`` [..., K] → [..., N]."""
    y = input @ weight_of(qweight, scales, offsets).T
    return y if bias is None else y + bias


def int4_gemm_backward(grad_output, input, qweight, scales, offsets, bias=None):
    """The gradients of ``input`` and ``bias``."""
    gradients = {"input": grad_output @ weight_of(qweight, scales, offsets)}
    if bias is not None:
        gradients["bias"] = grad_output.sum(tuple(range(grad_output.ndim - 1)))
    return gradients
