"""fp8 linear in NumPy: e4m3 by its definition, everything after the rounding in float64.

e4m3 (Micikevicius et al., FP8 Formats for Deep Learning, 2022, table 1; "fn": no infinities) is sign, 4 bits of
exponent e, 3 bits of mantissa m:

    e > 0: ±2^(e − 7) · (1 + m/8)        e = 0: ±2^−6 · m/8        e = 15 and m = 7: NaN

A tensor is stored as q · scale. The scale is float32, amax / 448, and q the e4m3 number nearest to the float32 quotient
x / scale, so the bytes do not depend on who computes them. Then

    y = (q · scale) · (weight · weight_scale)ᵀ + bias        dx = dy · (weight · weight_scale)        dbias = Σ_rows dy

The gradient is straight-through: the rounding of the activations counts as the identity, where it saturates as well.
"""

from __future__ import annotations

import numpy as np

LARGEST = 448.0
SMALLEST_SCALE = np.finfo(np.float32).smallest_normal


def decode_e4m3(codes):
    """uint8 codes → their values."""
    codes = np.asarray(codes, np.int64)
    sign, exponent, mantissa = codes >> 7, (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent > 0, 2.0 ** (exponent - 7) * (1 + mantissa / 8), 2.0**-6 * mantissa / 8)
    magnitude = np.where((exponent == 15) & (mantissa == 7), np.nan, magnitude)
    return np.where(sign == 1, -magnitude, magnitude)


def encode_e4m3(values):
    """Values → the uint8 codes nearest to them, ties to the even code; ±448 beyond that, 0x7F for NaN."""
    values = np.asarray(values, np.float64)
    magnitudes = decode_e4m3(np.arange(0x7F))
    midpoints = (magnitudes[:-1] + magnitudes[1:]) / 2
    below = np.searchsorted(midpoints, np.abs(values), side="left")
    above = np.searchsorted(midpoints, np.abs(values), side="right")  # differs from `below` on a midpoint
    codes = np.where(below % 2 == 0, below, above) + np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, codes).astype(np.uint8)


def row_scale(x):
    """float32 [..., K] → [...]: the largest magnitude over 448, NaN aside; never below the smallest normal number."""
    largest = np.max(np.where(np.isnan(x), 0, np.abs(x)), axis=-1, initial=0).astype(np.float32)
    return np.maximum(largest / np.float32(LARGEST), SMALLEST_SCALE)


def quantize_fp8(tensor, axis=None):
    """[..., K] → uint8 codes of that shape and float32 scale, [] with ``axis=None``, [...] with -1."""
    x = np.asarray(tensor, np.float32)
    scale = row_scale(x.reshape(-1) if axis is None else x)
    return _codes(x, scale), scale


def _codes(x, scale):
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return encode_e4m3(x / np.asarray(scale, np.float32)[..., None])


def fp8_gemm(input, weight, weight_scale, input_scale=None, bias=None, out_dtype=None):
    """input [..., K], weight [N, K] of e4m3 values, weight_scale [] or [N], input_scale [] or None → [..., N].

    ``out_dtype`` is about the last rounding, of which there is none here.
    """
    with np.errstate(over="ignore"):
        x = np.asarray(input, np.float32)
    scale = row_scale(x) if input_scale is None else np.float32(input_scale)
    return linear(decode_e4m3(_codes(x, scale)) * np.asarray(scale, np.float64)[..., None], weight, weight_scale, bias)


def linear(input, weight, weight_scale, bias=None):
    """input · (weight · weight_scale)ᵀ + bias."""
    with np.errstate(invalid="ignore"):
        y = input @ (weight * np.asarray(weight_scale, np.float64)[..., None]).T
    return y if bias is None else y + bias


def fp8_gemm_unrounded(input, weight, weight_scale, input_scale=None, bias=None, out_dtype=None):
    """:func:`fp8_gemm` of activations that are not rounded: what the gradient is the derivative of."""
    return linear(input, weight, weight_scale, bias)


def fp8_gemm_backward(grad_output, input, weight, weight_scale, input_scale=None, bias=None, out_dtype=None):
    """The gradients of ``input`` and ``bias``."""
    gradients = {"input": grad_output @ (weight * np.asarray(weight_scale, np.float64)[..., None])}
    if bias is not None:
        gradients["bias"] = grad_output.reshape(-1, weight.shape[0]).sum(0)
    return gradients
