"""Softmax tile programs of the backward pass.

softmax: dx = scale · y · (dy − Σ y·dy / Σ y);  log_softmax: dx = scale · (dy − exp(y) · Σ dy).  y was rounded and need
not sum to 1: without Σ y a saturated row's gradient would be all rounding.
"""

import triton
import triton.language as tl

from fusedops.runtime.tile import gather, load, publish

from .kernel import columns_seen, load_mask, near, start_of_mask


@triton.jit(do_not_specialize=["rows"])
def softmax_backward(
    dy_ptr,
    y_ptr,
    mask_ptr,
    dx_ptr,
    rows,
    width,
    stride_dy,
    stride_y,
    queries,
    mask_size_1,
    mask_size_2,
    mask_stride_0,
    mask_stride_1,
    mask_stride_2,
    scale,
    LOG: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK_COLUMNS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dy, y [rows, width] with any row strides → dx [rows, width] contiguous.

    The mask (None for none) is bool: dx is 0 where it is False, and where ``CAUSAL`` hides a column. It is laid out as
    in :func:`softmax_forward`.
    """
    column = tl.arange(0, BLOCK_N)[None, :]
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        index = (block * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        row = index.to(tl.int64)
        dy_row = dy_ptr + row * stride_dy
        y_row = y_ptr + row * stride_y
        mask_start = start_of_mask(index, mask_size_1, mask_size_2, mask_stride_0, mask_stride_1, mask_stride_2)
        limit = columns_seen(index, width, queries, CAUSAL)
        if ONE_TILE:
            inside = (row < rows) & (column < width)
            seen = kept(mask_ptr, mask_start, column, inside, limit, CAUSAL, MASK_COLUMNS)
            close = near(column, inside, limit, CAUSAL)
            dy = load(dy_row + column, inside if LOG else close)
            y = load(y_row + column, close)
            total = tl.sum(dy if LOG else tl.where(seen, dy * y, 0.0), axis=1, keep_dims=True)
            if not LOG:
                total = mean_of(total, tl.sum(tl.where(seen, y, 0.0), axis=1, keep_dims=True))
            dx = gradient(dy, y, total, seen, scale, LOG)
            tl.store(dx_ptr + row * width + column, dx.to(dx_ptr.dtype.element_ty), inside)
        else:
            products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            parts = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in tl.range(0, width, BLOCK_N):
                offset = start + column
                inside = (row < rows) & (offset < width)
                if LOG:
                    products += load(dy_row + offset, inside)
                else:
                    seen = kept(mask_ptr, mask_start, offset, inside, limit, CAUSAL, MASK_COLUMNS)
                    close = near(offset, inside, limit, CAUSAL)
                    y = load(y_row + offset, close)
                    products += tl.where(seen, load(dy_row + offset, close) * y, 0.0)
                    parts += tl.where(seen, y, 0.0)
            total = tl.sum(products, axis=1, keep_dims=True)
            if not LOG:
                total = mean_of(total, tl.sum(parts, axis=1, keep_dims=True))
            # Backwards: what was read last is nearest.
            last = (tl.cdiv(width, BLOCK_N) - 1) * BLOCK_N
            for back in tl.range(0, width, BLOCK_N):
                offset = last - back + column
                inside = (row < rows) & (offset < width)
                seen = kept(mask_ptr, mask_start, offset, inside, limit, CAUSAL, MASK_COLUMNS)
                close = near(offset, inside, limit, CAUSAL)
                dx = gradient(load(dy_row + offset, close), load(y_row + offset, close), total, seen, scale, LOG)
                tl.store(dx_ptr + row * width + offset, dx.to(dx_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "splits"])
def softmax_backward_split(
    dy_ptr,
    y_ptr,
    mask_ptr,
    dx_ptr,
    slots_ptr,
    rows,
    width,
    chunk,
    splits,
    stride_dy,
    stride_y,
    queries,
    mask_size_1,
    mask_size_2,
    mask_stride_0,
    mask_stride_1,
    mask_stride_2,
    scale,
    LOG: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK_COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """:func:`softmax_backward` of wide rows: ``splits`` programs share a row, as in :func:`softmax_forward_split`.

    They exchange their shares of the two sums (of Σ dy alone for log_softmax).
    """
    split = tl.program_id(0) % splits
    group = tl.program_id(0) // splits
    groups = tl.num_programs(0) // splits
    column = split * chunk + tl.arange(0, BLOCK_N)
    inside = (tl.arange(0, BLOCK_N) < chunk) & (column < width)
    dy = tl.load(dy_ptr + group.to(tl.int64) * stride_dy + column, inside & (group < rows), other=0.0)
    # One step more than there are rows: a step begins a row, loads the next one and finishes the one before.
    for step in range(group, rows + groups, groups):
        row = step + tl.full([], 0, tl.int64)
        if step < rows:
            slots = slots_ptr + row * 2 * splits + split
            if LOG:
                publish(slots, tl.sum(dy.to(tl.float32), axis=0))
            else:
                mask_start = start_of_mask(row, mask_size_1, mask_size_2, mask_stride_0, mask_stride_1, mask_stride_2)
                limit = columns_seen(row, width, queries, CAUSAL)
                seen = kept(mask_ptr, mask_start, column, inside, limit, CAUSAL, MASK_COLUMNS)
                y = load(y_ptr + row * stride_y + column, near(column, inside, limit, CAUSAL))
                publish(slots, tl.sum(tl.where(seen, dy.to(tl.float32) * y, 0.0), axis=0))
                publish(slots + splits, tl.sum(tl.where(seen, y, 0.0), axis=0))
        after = row + groups
        dy = tl.load(dy_ptr + after * stride_dy + column, inside & (after < rows), other=0.0)
        if step != group:
            before = row - groups
            mask_start = start_of_mask(before, mask_size_1, mask_size_2, mask_stride_0, mask_stride_1, mask_stride_2)
            limit = columns_seen(before, width, queries, CAUSAL)
            seen = kept(mask_ptr, mask_start, column, inside, limit, CAUSAL, MASK_COLUMNS)
            close = near(column, inside, limit, CAUSAL)
            dy_before = load(dy_ptr + before * stride_dy + column, close)
            y = load(y_ptr + before * stride_y + column, close)
            slots = slots_ptr + before * 2 * splits
            total = tl.sum(gather(slots, splits, SPLITS), axis=0)
            if not LOG:
                total = mean_of(total, tl.sum(gather(slots + splits, splits, SPLITS), axis=0))
            dx = gradient(dy_before, y, total, seen, scale, LOG)
            tl.store(dx_ptr + before * width + column, dx.to(dx_ptr.dtype.element_ty), inside)


@triton.jit
def kept(mask_ptr, mask_start, column, inside, limit, CAUSAL: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """What is inside the row and neither a bool mask nor ``CAUSAL`` hides."""
    seen = inside & (column < limit) if CAUSAL else inside
    if mask_ptr is not None:
        seen = seen & load_mask(mask_ptr, mask_start, column, near(column, inside, limit, CAUSAL), MASK_COLUMNS)
    return seen


@triton.jit
def mean_of(total, whole):
    """Σ y·dy / Σ y; a row with nothing kept has the mean 0."""
    return total / tl.where(whole == 0, 1.0, whole)


@triton.jit
def gradient(dy, y, total, seen, scale, LOG: tl.constexpr):
    """dx, 0 where it is not seen."""
    dx = dy - tl.exp(y) * total if LOG else y * (dy - total)
    return tl.where(seen, dx * scale, 0.0)
