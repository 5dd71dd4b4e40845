"""Tile arithmetic that several kernels share. Imported where triton is."""

import triton
import triton.language as tl


@triton.jit
def scale_for(largest):
    """A power of two that brings a row with this largest magnitude to where float32 squares and sums are exact enough.

    Up to 2^18 squares of numbers between 2^-50 and 2^50 neither overflow nor vanish; such rows keep the scale 1.
    """
    scale = tl.where(largest > 1.1259e15, 8.271806e-25, 1.0)  # above 2^50: 2^-80
    return tl.where(largest < 8.8818e-16, 1.2676506e30, scale)  # below 2^-50: 2^100


@triton.jit
def reciprocal_root(sum_of_squares, scale, width, eps):
    """1 / sqrt(mean + eps) for squares that were taken of values times ``scale``."""
    mean = sum_of_squares / width
    # Scaled rows: hypot(root, sqrt(eps)), which neither overflows nor vanishes where its parts squared would.
    root = tl.sqrt(mean) / scale
    root_eps = tl.sqrt(eps)
    # Not tl.maximum, which on a GPU gives the other operand where one is NaN.
    high = tl.where(root < root_eps, root_eps, root)
    low = tl.where(root < root_eps, root, root_eps)
    ratio = tl.where(high > 0, low / high, 0.0)
    return tl.where(scale == 1.0, tl.rsqrt(mean + eps), 1.0 / (high * tl.sqrt(1.0 + ratio * ratio)))


@triton.jit
def load(pointer, mask):
    """A tile in float32, 0 outside the mask."""
    return tl.load(pointer, mask, other=0.0).to(tl.float32)
