"""Softmax tile programs: a row that fits one tile stays in registers; a wider one is walked twice.

The first walk is online (Milakov & Gimelshein 2018): each column of the tile keeps a maximum and a sum of its own.
"""

import triton
import triton.language as tl

from fusedops.runtime.tile import load


@triton.jit(do_not_specialize=["rows"])
def softmax_forward(
    x_ptr,
    y_ptr,
    rows,
    width,
    stride_x,
    LOG: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """x [rows, width] with any row stride → y [rows, width] contiguous: softmax, or its logarithm."""
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
    x_row = x_ptr + row * stride_x
    y_row = y_ptr + row * width
    column = tl.arange(0, BLOCK_N)[None, :]

    if ONE_TILE:
        x = load_scores(x_row + column, (row < rows) & (column < width))
        largest = tl.max(x, axis=1, keep_dims=True)
        total = tl.sum(tl.exp(x - finite(largest)), axis=1, keep_dims=True)
    else:
        maxima = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, width, BLOCK_N):
            x = load_scores(x_row + start + column, (row < rows) & (start + column < width))
            larger = tl.maximum(maxima, x)
            sums = sums * tl.exp(maxima - finite(larger)) + tl.exp(x - finite(larger))
            maxima = larger
        largest = tl.max(maxima, axis=1, keep_dims=True)
        total = tl.sum(sums * tl.exp(maxima - finite(largest)), axis=1, keep_dims=True)

    for start in range(0, width, BLOCK_N):
        mask = (row < rows) & (start + column < width)
        if not ONE_TILE:
            x = load_scores(x_row + start + column, mask)
        # A row of −inf has the sum 0 and gives NaN, as in PyTorch.
        y = x - largest - tl.log(total) if LOG else tl.exp(x - finite(largest)) / total
        tl.store(y_row + start + column, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def softmax_backward(
    dy_ptr,
    y_ptr,
    dx_ptr,
    rows,
    width,
    stride_dy,
    stride_y,
    LOG: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dy, y [rows, width] with any row stride → dx [rows, width] contiguous.

    y was rounded and need not sum to 1: Σ y·dy is divided by Σ y, or a saturated row's gradient would be all rounding.
    """
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
    dy_row = dy_ptr + row * stride_dy
    y_row = y_ptr + row * stride_y
    dx_row = dx_ptr + row * width
    column = tl.arange(0, BLOCK_N)[None, :]

    if ONE_TILE:
        mask = (row < rows) & (column < width)
        dy = load(dy_row + column, mask)
        y = load(y_row + column, mask)
        products = dy if LOG else dy * y
        parts = y
    else:
        products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        parts = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, width, BLOCK_N):
            mask = (row < rows) & (start + column < width)
            dy = load(dy_row + start + column, mask)
            if LOG:
                products += dy
            else:
                y = load(y_row + start + column, mask)
                products += dy * y
                parts += y
    total = tl.sum(products, axis=1, keep_dims=True)
    if not LOG:
        whole = tl.sum(parts, axis=1, keep_dims=True)
        total /= tl.where(whole == 0, 1.0, whole)

    for start in range(0, width, BLOCK_N):
        mask = (row < rows) & (start + column < width)
        if not ONE_TILE:
            dy = load(dy_row + start + column, mask)
            y = load(y_row + start + column, mask)
        dx = dy - tl.exp(y) * total if LOG else y * (dy - total)
        tl.store(dx_row + start + column, dx.to(dx_ptr.dtype.element_ty), mask)


@triton.jit
def load_scores(pointer, mask):
    """A tile in float32, −inf outside the mask."""
    return tl.load(pointer, mask, other=float("-inf")).to(tl.float32)


@triton.jit
def finite(largest):
    """The maximum to subtract: 0 for −inf, since −inf − (−inf) is NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)
