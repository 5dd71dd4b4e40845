"""RMSNorm tile programs.

A program owns whole rows, and walks over the rows with the stride of the grid. A row that fits one tile (``ONE_TILE``)
is read once and stays in registers; a wider one is walked twice, and the second read comes from L2.
"""

import triton
import triton.language as tl

from fusedops.runtime.tile import (
    gather,
    in_range,
    load,
    publish,
    reciprocal_root,
    reciprocal_root_of_sum,
    scale_for,
)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_forward(
    x_ptr,
    residual_ptr,
    w_ptr,
    y_ptr,
    sum_ptr,
    rstd_ptr,
    rows,
    width,
    stride_x,
    stride_residual,
    eps,
    weight_offset,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x, residual [rows, width] with any row strides → y and sum [rows, width] contiguous, rstd [rows] float32.

    Without a residual (None) there is no sum; without rstd_ptr nothing is kept for the backward pass.
    """
    column = tl.arange(0, BLOCK_N)[None, :]
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        row = (block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]

        if ONE_TILE:
            mask = (row < rows) & (column < width)
            x = load_sum(x_ptr, residual_ptr, row, stride_x, stride_residual, column, mask)
            if sum_ptr is not None:
                tl.store(sum_ptr + row * width + column, x.to(sum_ptr.dtype.element_ty), mask)
            rstd = reciprocal_root_of_sum(tl.sum(x * x, axis=1), x, width, eps)
            w = load_weight(w_ptr, column, width, weight_offset)
            store_output(y_ptr + row * width, x, w, column, mask, rstd, x_ptr.dtype.element_ty, CAST_BEFORE_WEIGHT)
        else:
            squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in tl.range(0, width, BLOCK_N):
                offset = start + column
                mask = (row < rows) & (offset < width)
                x = load_sum(x_ptr, residual_ptr, row, stride_x, stride_residual, offset, mask)
                if sum_ptr is not None:
                    tl.store(sum_ptr + row * width + offset, x.to(sum_ptr.dtype.element_ty), mask)
                squares += x * x
            total = tl.sum(squares, axis=1)
            rstd = tl.rsqrt(total / width + eps)
            if tl.max((in_range(total) == 0).to(tl.int32), axis=0) != 0:
                rstd = scaled_reciprocal_root(
                    x_ptr, residual_ptr, row, rows, width, stride_x, stride_residual, eps, BLOCK_M, BLOCK_N
                )
            # Backwards: what was read last is nearest.
            last = (tl.cdiv(width, BLOCK_N) - 1) * BLOCK_N
            for back in tl.range(0, width, BLOCK_N):
                offset = last - back + column
                mask = (row < rows) & (offset < width)
                x = load_sum(x_ptr, residual_ptr, row, stride_x, stride_residual, offset, mask)
                w = load_weight(w_ptr, offset, width, weight_offset)
                store_output(y_ptr + row * width, x, w, offset, mask, rstd, x_ptr.dtype.element_ty, CAST_BEFORE_WEIGHT)
        if rstd_ptr is not None:
            tl.store(rstd_ptr + row, rstd[:, None], row < rows)


@triton.jit
def scaled_reciprocal_root(
    x_ptr, residual_ptr, row, rows, width, stride_x, stride_residual, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """rstd of rows whose squares leave float32's range."""
    column = tl.arange(0, BLOCK_N)[None, :]
    largest = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_N):
        mask = (row < rows) & (start + column < width)
        x = load_sum(x_ptr, residual_ptr, row, stride_x, stride_residual, start + column, mask)
        largest = tl.maximum(largest, tl.abs(x))
    scale = scale_for(tl.max(largest, axis=1))
    squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_N):
        mask = (row < rows) & (start + column < width)
        x = load_sum(x_ptr, residual_ptr, row, stride_x, stride_residual, start + column, mask) * scale[:, None]
        squares += x * x
    return reciprocal_root(tl.sum(squares, axis=1), scale, width, eps)


@triton.jit
def load_sum(x_ptr, residual_ptr, row, stride_x, stride_residual, column, mask):
    """x, or x + residual rounded as the new residual is, in float32 and 0 outside the mask."""
    x = load(x_ptr + row * stride_x + column, mask)
    if residual_ptr is not None:
        x = (x + load(residual_ptr + row * stride_residual + column, mask)).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def load_weight(w_ptr, offset, width, weight_offset):
    """weight_offset + w in float32; 1 without a weight."""
    w = 1.0
    if w_ptr is not None:
        w = load(w_ptr + offset, offset < width) + weight_offset
    return w


@triton.jit
def store_output(y_row, x, w, offset, mask, rstd, x_dtype: tl.constexpr, CAST_BEFORE_WEIGHT: tl.constexpr):
    """y = x · rstd · w."""
    y = x * rstd[:, None]
    if CAST_BEFORE_WEIGHT:
        y = y.to(x_dtype).to(tl.float32)
    y *= w
    tl.store(y_row + offset, y.to(y_row.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows", "splits"])
def rms_norm_forward_split(
    x_ptr,
    residual_ptr,
    w_ptr,
    y_ptr,
    sum_ptr,
    rstd_ptr,
    slots_ptr,
    rows,
    width,
    chunk,
    splits,
    stride_x,
    stride_residual,
    eps,
    weight_offset,
    CAST_BEFORE_WEIGHT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """:func:`rms_norm_forward` of wide rows: ``splits`` programs share a row, each with ``chunk`` of its columns.

    They exchange their sums of squares through slots [rows, 3, splits] int64, 0 before the launch; all programs must be
    resident (a cooperative launch). A sum has the time of a whole step to travel; by then its row comes from L1 or L2.
    ``SPLITS`` is the power of two from ``splits`` on.
    """
    split = tl.program_id(0) % splits
    group = tl.program_id(0) // splits
    groups = tl.num_programs(0) // splits
    column = split * chunk + tl.arange(0, BLOCK_N)
    inside = (tl.arange(0, BLOCK_N) < chunk) & (column < width)
    w = load_weight(w_ptr, column, width, weight_offset)
    row = group.to(tl.int64)
    x = load_sum(x_ptr, residual_ptr, row, stride_x, stride_residual, column, inside & (row < rows))
    # One step more than there are rows: a step begins a row, loads the next one and finishes the one before.
    for step in range(group, rows + groups, groups):
        row = step + tl.full([], 0, tl.int64)
        if sum_ptr is not None:
            tl.store(sum_ptr + row * width + column, x.to(sum_ptr.dtype.element_ty), inside & (row < rows))
        share = tl.sum(x * x, axis=0)
        if step < rows:
            publish(slots_ptr + row * 3 * splits + split, share)
        after = row + groups
        x = load_sum(x_ptr, residual_ptr, after, stride_x, stride_residual, column, inside & (after < rows))
        before = row - groups
        if step != group:
            x_before = load_sum(x_ptr, residual_ptr, before, stride_x, stride_residual, column, inside)
            slots = slots_ptr + before * 3 * splits
            total = tl.sum(gather(slots, splits, SPLITS), axis=0)
            rstd = tl.rsqrt(total / width + eps)
            if in_range(total) == 0:
                publish(slots + splits + split, tl.max(tl.abs(x_before), axis=0))
                scale = scale_for(tl.max(gather(slots + splits, splits, SPLITS), axis=0))
                publish(slots + 2 * splits + split, tl.sum((x_before * scale) * (x_before * scale), axis=0))
                total = tl.sum(gather(slots + 2 * splits, splits, SPLITS), axis=0)
                rstd = reciprocal_root(total, scale, width, eps)
            y = x_before * rstd
            if CAST_BEFORE_WEIGHT:
                y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
            y *= w
            tl.store(y_ptr + before * width + column, y.to(y_ptr.dtype.element_ty), inside)
            if (rstd_ptr is not None) and (split == 0):
                tl.store(rstd_ptr + before, rstd)
