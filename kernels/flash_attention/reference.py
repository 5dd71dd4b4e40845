"""Attention in NumPy float64 (Vaswani et al. 2017, equation 1), and its gradient.

    S = softmax_scale · Q Kᵀ      P = exp(S − lse)      lse = log Σ_keys exp(S)      O = P V

Query i sees key j where j ≤ i + diagonal; elsewhere S = −inf. A query that sees no key has O = 0 and lse = −inf.
With D = Σ dO·O a query (Dao 2023, section 3.1):

    dV = Pᵀ dO      dS = P ∘ (dO Vᵀ − D)      dQ = softmax_scale · dS K      dK = softmax_scale · dSᵀ Q
"""

from __future__ import annotations

import math

import numpy as np


def flash_attention(query, key, value, softmax_scale=None, causal=False, causal_alignment="top_left"):
    """``query`` [batch, heads_q, seq_q, head_dim], ``key`` [batch, heads_kv, seq_kv, head_dim] and ``value`` [batch,
    heads_kv, seq_kv, head_dim_v] → [batch, heads_q, seq_q, head_dim_v]. Query head h uses key head h // group.
    """
    probabilities, _ = softmax(query, key, softmax_scale, causal, causal_alignment)
    return probabilities @ repeat(value, query)


def softmax(query, key, softmax_scale=None, causal=False, causal_alignment="top_left"):
    """P [batch, heads_q, seq_q, seq_kv] and lse [batch, heads_q, seq_q]."""
    seq_q, seq_kv = query.shape[2], key.shape[2]
    scores = scale(query, softmax_scale) * query @ repeat(key, query).swapaxes(-1, -2)
    if causal:
        diagonal = seq_kv - seq_q if causal_alignment == "bottom_right" else 0
        visible = np.arange(seq_kv) <= np.arange(seq_q)[:, None] + diagonal
        scores = np.where(visible, scores, -np.inf)
    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    largest = np.where(np.isneginf(largest), 0.0, largest)
    exponentials = np.exp(scores - largest)
    total = exponentials.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (largest + np.log(total))[..., 0]
    return exponentials / np.where(total > 0, total, 1.0), lse


def flash_attention_backward(
    grad_output, query, key, value, softmax_scale=None, causal=False, causal_alignment="top_left"
):
    """The gradients of ``query``, ``key`` and ``value``; those of a key head add up over its query heads."""
    p, _ = softmax(query, key, softmax_scale, causal, causal_alignment)
    factor = scale(query, softmax_scale)
    dp = grad_output @ repeat(value, query).swapaxes(-1, -2)
    ds = p * (dp - np.sum(grad_output * (p @ repeat(value, query)), axis=-1, keepdims=True))
    return {
        "query": factor * ds @ repeat(key, query),
        "key": add_up(factor * ds.swapaxes(-1, -2) @ query, key),
        "value": add_up(p.swapaxes(-1, -2) @ grad_output, value),
    }


def scale(query, softmax_scale):
    """``softmax_scale``, by default 1 / sqrt(head_dim)."""
    return 1 / math.sqrt(query.shape[-1]) if softmax_scale is None else softmax_scale


def repeat(array, query):
    """Each key/value head once for every query head that uses it."""
    return np.repeat(array, query.shape[1] // array.shape[1], axis=1)


def add_up(gradient, array):
    """The inverse of :func:`repeat` for gradients: [batch, heads_q, …] → the shape of ``array``."""
    batch, heads_kv = array.shape[:2]
    return gradient.reshape(batch, heads_kv, gradient.shape[1] // heads_kv, *array.shape[2:]).sum(axis=2)
