"""Scaled dot-product attention in NumPy float64 (Vaswani et al. 2017, equation 1), and its gradient.

    S = scale·Q·Kᵀ (−∞ where masked)    P = softmax(S)    O = P·V

    dV = Pᵀ·dO    dS = P∘(dO·Vᵀ − rowsum(dO∘O))    dQ = scale·dS·K    dK = scale·dSᵀ·Q

Query head h uses the kv head h // (heads_q / heads_kv), so dK and dV sum over the heads of a group.
"""

from __future__ import annotations

import numpy as np


def flash_attention(query, key, value, softmax_scale=None, causal=False, causal_alignment="top_left"):
    """query [batch, heads_q, seq_q, d], key [batch, heads_kv, seq_kv, d], value [batch, heads_kv, seq_kv, dv]."""
    probabilities = attention_probabilities(query, key, softmax_scale, causal, causal_alignment)
    return probabilities @ per_query_head(value, query)


def flash_attention_backward(
    grad_output, query, key, value, softmax_scale=None, causal=False, causal_alignment="top_left"
):
    """The gradients of query, key and value."""
    scale = default_scale(query, softmax_scale)
    k, v = per_query_head(key, query), per_query_head(value, query)
    p = attention_probabilities(query, key, softmax_scale, causal, causal_alignment)
    delta = np.sum(grad_output * (p @ v), axis=-1, keepdims=True)
    ds = p * (grad_output @ v.swapaxes(-1, -2) - delta)
    return {
        "query": scale * ds @ k,
        "key": sum_over_group(scale * ds.swapaxes(-1, -2) @ query, key),
        "value": sum_over_group(p.swapaxes(-1, -2) @ grad_output, value),
    }


def attention_probabilities(query, key, softmax_scale, causal, causal_alignment):
    """softmax(S) [batch, heads_q, seq_q, seq_kv]; a row that sees no key is 0."""
    scores = default_scale(query, softmax_scale) * query @ per_query_head(key, query).swapaxes(-1, -2)
    if causal:
        seq_q, seq_kv = scores.shape[-2:]
        shift = seq_kv - seq_q if causal_alignment == "bottom_right" else 0
        visible = np.arange(seq_kv)[None, :] <= np.arange(seq_q)[:, None] + shift
        scores = np.where(visible, scores, -np.inf)
    largest = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(largest), 0.0, largest))
    total = np.sum(weights, axis=-1, keepdims=True)
    return weights / np.where(total > 0, total, 1.0)


def default_scale(query, softmax_scale):
    """1 / sqrt(head_dim) unless a scale is given."""
    return query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def per_query_head(tensor, query):
    """A kv tensor with each head repeated for the query heads that share it."""
    return np.repeat(tensor, query.shape[1] // tensor.shape[1], axis=1)


def sum_over_group(gradient, tensor):
    """A gradient [batch, heads_q, …] summed over the query heads of each kv head."""
    batch, heads_kv, *rest = tensor.shape
    return gradient.reshape(batch, heads_kv, gradient.shape[1] // heads_kv, *rest).sum(2)
