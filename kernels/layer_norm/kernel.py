"""LayerNorm tile programs, as rms_norm's: a row that fits one tile stays in registers, a wider one is walked.

The variance is taken of the centred row, in a pass of its own: mean(x²) − mean(x)² cancels where the mean is large.
What rounding left of the mean (the mean of the centred row) is taken off once more, and both parts
go to the backward kernel as one float64.
"""

import triton
import triton.language as tl

from fusedops.runtime.tile import load, reciprocal_root, scale_for


@triton.jit(do_not_specialize=["rows"])
def layer_norm_forward(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    width,
    stride_x,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """x [rows, width] with any row stride → y [rows, width] contiguous, mean [rows] float64, rstd [rows] float32."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    row_mask = row[:, None] < rows
    x_row = x_ptr + row[:, None] * stride_x
    y_row = y_ptr + row[:, None] * width
    column = tl.arange(0, BLOCK_N)[None, :]

    if ONE_TILE:
        mask = row_mask & (column < width)
        x = load(x_row + column, mask)
        scale = scale_for(tl.max(tl.abs(x), axis=1))
        x *= scale[:, None]
        mean = mean_of(tl.sum(x, axis=1), width)
        centred = tl.where(mask, x - mean[:, None], 0.0)
        rest = mean_of(tl.sum(centred, axis=1), width)
        centred = tl.where(mask, centred - rest[:, None], 0.0)
        squares = centred * centred
    else:
        largest = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, width, BLOCK_N):
            x = load(x_row + start + column, row_mask & (start + column < width))
            largest = tl.maximum(largest, tl.abs(x))
            total += x * 9.5367431640625e-07  # 2^-20: a sum of 2^20 finite numbers stays finite
        scale = scale_for(tl.max(largest, axis=1))
        mean = mean_of(tl.sum(total, axis=1), width) * 1048576.0 * scale
        deviations = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, width, BLOCK_N):
            mask = row_mask & (start + column < width)
            x = load(x_row + start + column, mask) * scale[:, None]
            deviations += tl.where(mask, x - mean[:, None], 0.0)
        rest = mean_of(tl.sum(deviations, axis=1), width)
        squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, width, BLOCK_N):
            mask = row_mask & (start + column < width)
            x = load(x_row + start + column, mask) * scale[:, None]
            centred = tl.where(mask, x - mean[:, None] - rest[:, None], 0.0)
            squares += centred * centred
    rstd = reciprocal_root(tl.sum(squares, axis=1), scale, width, eps)
    tl.store(mean_ptr + row, (mean.to(tl.float64) + rest.to(tl.float64)) / scale.to(tl.float64), row < rows)
    tl.store(rstd_ptr + row, rstd, row < rows)
    rstd /= scale

    for start in range(0, width, BLOCK_N):
        offset = start + column
        mask = row_mask & (offset < width)
        if not ONE_TILE:
            centred = load(x_row + offset, mask) * scale[:, None] - mean[:, None] - rest[:, None]
        y = centred * rstd[:, None]
        if HAS_WEIGHT:
            y *= load(w_ptr + offset, offset < width)
        if HAS_BIAS:
            y += load(b_ptr + offset, offset < width)
        tl.store(y_row + offset, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def mean_of(total, count):
    """total / count, correctly rounded (``/`` is not, on a GPU), so that nothing is left of a constant row."""
    return tl.div_rn(total, tl.zeros_like(total) + count)


@triton.jit(do_not_specialize=["rows"])
def layer_norm_backward(
    dy_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    rows,
    width,
    stride_dy,
    stride_x,
    HAS_WEIGHT: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dx [rows, width], and this program's share of dw and db: [programs, width] float32, all of it written here.

    Program p takes the row blocks p, p + programs, …, in order, so that two runs add the same numbers the same way.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_N)[None, :]
    dw_row = dw_ptr + program.to(tl.int64) * width
    db_row = db_ptr + program.to(tl.int64) * width
    dw = tl.zeros([1, BLOCK_N], tl.float32)
    db = tl.zeros([1, BLOCK_N], tl.float32)

    for block in range(program, tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        row = (block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
        x_row = x_ptr + row * stride_x
        dy_row = dy_ptr + row * stride_dy
        dx_row = dx_ptr + row * width
        exact = tl.load(mean_ptr + row, row < rows, other=0.0)
        mean = exact.to(tl.float32)
        rest = (exact - mean.to(tl.float64)).to(tl.float32)
        rstd = load(rstd_ptr + row, row < rows)

        if ONE_TILE:
            mask = (row < rows) & (column < width)
            x_hat, dy, g = load_tile(x_row, dy_row, w_ptr, column, mask, mean, rest, rstd, HAS_WEIGHT)
            mean_g = mean_of(tl.sum(g, axis=1, keep_dims=True), width)
            mean_gx = mean_of(tl.sum(g * x_hat, axis=1, keep_dims=True), width)
            tl.store(dx_row + column, (rstd * (g - mean_g - x_hat * mean_gx)).to(dx_ptr.dtype.element_ty), mask)
            if WEIGHT_GRAD:
                dw += tl.sum(dy * x_hat, axis=0, keep_dims=True)
            if BIAS_GRAD:
                db += tl.sum(dy, axis=0, keep_dims=True)
        else:
            sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in range(0, width, BLOCK_N):
                mask = (row < rows) & (start + column < width)
                x_hat, dy, g = load_tile(x_row, dy_row, w_ptr, start + column, mask, mean, rest, rstd, HAS_WEIGHT)
                sums += g
                products += g * x_hat
            mean_g = mean_of(tl.sum(sums, axis=1, keep_dims=True), width)
            mean_gx = mean_of(tl.sum(products, axis=1, keep_dims=True), width)
            for start in range(0, width, BLOCK_N):
                offset = start + column
                mask = (row < rows) & (offset < width)
                x_hat, dy, g = load_tile(x_row, dy_row, w_ptr, offset, mask, mean, rest, rstd, HAS_WEIGHT)
                tl.store(dx_row + offset, (rstd * (g - mean_g - x_hat * mean_gx)).to(dx_ptr.dtype.element_ty), mask)
                earlier = (offset < width) & (block != program)
                if WEIGHT_GRAD:
                    share = tl.sum(dy * x_hat, axis=0, keep_dims=True) + load(dw_row + offset, earlier)
                    tl.store(dw_row + offset, share, offset < width)
                if BIAS_GRAD:
                    share = tl.sum(dy, axis=0, keep_dims=True) + load(db_row + offset, earlier)
                    tl.store(db_row + offset, share, offset < width)

    if WEIGHT_GRAD and ONE_TILE:
        tl.store(dw_row + column, dw, column < width)
    if BIAS_GRAD and ONE_TILE:
        tl.store(db_row + column, db, column < width)


@triton.jit
def load_tile(x_row, dy_row, w_ptr, offset, mask, mean, rest, rstd, HAS_WEIGHT: tl.constexpr):
    """x̂, dy and g = dy·w, in float32 and 0 outside the mask."""
    x_hat = tl.where(mask, (load(x_row + offset, mask) - mean - rest) * rstd, 0.0)
    dy = load(dy_row + offset, mask)
    g = dy
    if HAS_WEIGHT:
        g = dy * load(w_ptr + offset, mask)
    return x_hat, dy, g
