"""RMSNorm tile programs.

A program owns whole rows. A row that fits one tile (``ONE_TILE``) is read once and stays in registers; a wider one is
walked twice, and the second read comes from L2.
"""

import triton
import triton.language as tl

from fusedops.runtime.tile import load, reciprocal_root, scale_for


@triton.jit(do_not_specialize=["rows"])
def rms_norm_forward(
    x_ptr,
    w_ptr,
    y_ptr,
    rstd_ptr,
    rows,
    width,
    stride_x,
    eps,
    weight_offset,
    HAS_WEIGHT: tl.constexpr,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """x [rows, width] with any row stride → y [rows, width] contiguous and rstd [rows] float32."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    row_mask = row[:, None] < rows
    x_row = x_ptr + row[:, None] * stride_x
    y_row = y_ptr + row[:, None] * width
    column = tl.arange(0, BLOCK_N)[None, :]

    if ONE_TILE:
        x = load(x_row + column, row_mask & (column < width))
        scale = scale_for(tl.max(tl.abs(x), axis=1))
        squares = (x * scale[:, None]) * (x * scale[:, None])
    else:
        largest = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, width, BLOCK_N):
            largest = tl.maximum(largest, tl.abs(load(x_row + start + column, row_mask & (start + column < width))))
        scale = scale_for(tl.max(largest, axis=1))
        squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, width, BLOCK_N):
            x = load(x_row + start + column, row_mask & (start + column < width)) * scale[:, None]
            squares += x * x
    rstd = reciprocal_root(tl.sum(squares, axis=1), scale, width, eps)
    tl.store(rstd_ptr + row, rstd, row < rows)

    for start in range(0, width, BLOCK_N):
        offset = start + column
        mask = row_mask & (offset < width)
        if not ONE_TILE:
            x = load(x_row + offset, mask)
        y = x * rstd[:, None]
        if CAST_BEFORE_WEIGHT:
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        if HAS_WEIGHT:
            y *= load(w_ptr + offset, offset < width) + weight_offset
        tl.store(y_row + offset, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward(
    dy_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    rows,
    width,
    stride_dy,
    stride_x,
    weight_offset,
    HAS_WEIGHT: tl.constexpr,
    WEIGHT_GRAD: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dx [rows, width], and this program's share of dw: dw [programs, width] float32, all of it written here.

    Program p takes the row blocks p, p + programs, …, in order, so that two runs add the same numbers the same way.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_N)[None, :]
    dw_row = dw_ptr + program.to(tl.int64) * width
    dw = tl.zeros([1, BLOCK_N], tl.float32)

    for block in range(program, tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        row = (block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
        x_row = x_ptr + row * stride_x
        dy_row = dy_ptr + row * stride_dy
        dx_row = dx_ptr + row * width
        rstd = tl.load(rstd_ptr + row, row < rows, other=0.0)

        if ONE_TILE:
            mask = (row < rows) & (column < width)
            x_hat, dy, g = load_tile(x_row, dy_row, w_ptr, column, mask, rstd, weight_offset, HAS_WEIGHT)
            mean = tl.sum(g * x_hat, axis=1, keep_dims=True) / width
            tl.store(dx_row + column, (rstd * (g - x_hat * mean)).to(dx_ptr.dtype.element_ty), mask)
            if WEIGHT_GRAD:
                dw += tl.sum(dy * x_hat, axis=0, keep_dims=True)
        else:
            products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in range(0, width, BLOCK_N):
                offset = start + column
                mask = (row < rows) & (offset < width)
                x_hat, dy, g = load_tile(x_row, dy_row, w_ptr, offset, mask, rstd, weight_offset, HAS_WEIGHT)
                products += g * x_hat
            mean = tl.sum(products, axis=1, keep_dims=True) / width
            for start in range(0, width, BLOCK_N):
                offset = start + column
                mask = (row < rows) & (offset < width)
                x_hat, dy, g = load_tile(x_row, dy_row, w_ptr, offset, mask, rstd, weight_offset, HAS_WEIGHT)
                tl.store(dx_row + offset, (rstd * (g - x_hat * mean)).to(dx_ptr.dtype.element_ty), mask)
                if WEIGHT_GRAD:
                    share = tl.sum(dy * x_hat, axis=0, keep_dims=True)
                    share += tl.load(dw_row + offset, (offset < width) & (block != program), other=0.0)
                    tl.store(dw_row + offset, share, offset < width)

    if WEIGHT_GRAD and ONE_TILE:
        tl.store(dw_row + column, dw, column < width)


@triton.jit
def load_tile(x_row, dy_row, w_ptr, offset, mask, rstd, weight_offset, HAS_WEIGHT: tl.constexpr):
    """x̂, dy and g = dy·(weight_offset + w), in float32 and 0 outside the mask."""
    x_hat = load(x_row + offset, mask) * rstd
    dy = load(dy_row + offset, mask)
    g = dy
    if HAS_WEIGHT:
        g = dy * (load(w_ptr + offset, mask) + weight_offset)
    return x_hat, dy, g
