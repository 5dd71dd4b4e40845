"""Softmax tile programs of the forward pass: y = exp(s − max(s)) / Σ exp(s − max(s)) or its log, s = x·scale + mask.

A program owns whole rows, and walks over the rows with the stride of the grid. A row that fits one tile (``ONE_TILE``)
is read once and stays in registers; a wider one is walked twice, and the second read comes from L2. The first walk is
online (Milakov & Gimelshein 2018): each column of the tile keeps a maximum and a sum of its own.
"""

import triton
import triton.language as tl

from fusedops.runtime.tile import gather, load, publish


@triton.jit(do_not_specialize=["rows"])
def softmax_forward(
    x_ptr,
    mask_ptr,
    y_ptr,
    rows,
    width,
    stride_x,
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
    """x [rows, width] with any row stride → y [rows, width] contiguous: softmax, or its logarithm.

    The mask (None for none) is bool, True to keep, or floating and added. The rows are [size_0, size_1, size_2] for it,
    with a stride for each; along the columns it has stride 1 (``MASK_COLUMNS``) or 0. ``CAUSAL``: of each ``queries``
    rows, row i sees the columns up to i + width − queries.
    """
    column = tl.arange(0, BLOCK_N)[None, :]
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        index = (block * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        row = index.to(tl.int64)
        x_row = x_ptr + row * stride_x
        mask_start = start_of_mask(index, mask_size_1, mask_size_2, mask_stride_0, mask_stride_1, mask_stride_2)
        limit = columns_seen(index, width, queries, CAUSAL)
        if ONE_TILE:
            inside = (row < rows) & (column < width)
            s = load_scores(x_row, mask_ptr, mask_start, column, inside, limit, scale, CAUSAL, MASK_COLUMNS)
            largest = tl.max(s, axis=1, keep_dims=True)
            e = tl.exp(s - finite(largest))
            total = tl.sum(e, axis=1, keep_dims=True)
            # A row of −inf has the sum 0 and gives NaN, as in PyTorch.
            y = s - largest - tl.log(total) if LOG else e * (1.0 / total)
            tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), inside)
        else:
            maxima = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
            sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in tl.range(0, width, BLOCK_N):
                offset = start + column
                inside = (row < rows) & (offset < width)
                s = load_scores(x_row, mask_ptr, mask_start, offset, inside, limit, scale, CAUSAL, MASK_COLUMNS)
                larger = tl.maximum(maxima, s)
                sums = sums * tl.exp(maxima - finite(larger)) + tl.exp(s - finite(larger))
                maxima = larger
            largest = tl.max(maxima, axis=1, keep_dims=True)
            total = tl.sum(sums * tl.exp(maxima - finite(largest)), axis=1, keep_dims=True)
            # Backwards: what was read last is nearest.
            last = (tl.cdiv(width, BLOCK_N) - 1) * BLOCK_N
            for back in tl.range(0, width, BLOCK_N):
                offset = last - back + column
                inside = (row < rows) & (offset < width)
                s = load_scores(x_row, mask_ptr, mask_start, offset, inside, limit, scale, CAUSAL, MASK_COLUMNS)
                y = s - largest - tl.log(total) if LOG else tl.exp(s - finite(largest)) * (1.0 / total)
                tl.store(y_ptr + row * width + offset, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "splits"])
def softmax_forward_split(
    x_ptr,
    mask_ptr,
    y_ptr,
    slots_ptr,
    rows,
    width,
    chunk,
    splits,
    stride_x,
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
    """:func:`softmax_forward` of wide rows: ``splits`` programs share a row, each with ``chunk`` of its columns.

    They exchange their maxima and sums of exponentials through slots [rows, 2, splits] int64, 0 before the launch; all
    programs must be resident (a cooperative launch). These have the time of a whole step to travel; by then the row
    comes from L1 or L2. ``SPLITS`` is the power of two from ``splits`` on.
    """
    split = tl.program_id(0) % splits
    group = tl.program_id(0) // splits
    groups = tl.num_programs(0) // splits
    column = split * chunk + tl.arange(0, BLOCK_N)
    inside = (tl.arange(0, BLOCK_N) < chunk) & (column < width)
    x = tl.load(x_ptr + group.to(tl.int64) * stride_x + column, inside & (group < rows), other=0.0)
    # One step more than there are rows: a step begins a row, loads the next one and finishes the one before.
    for step in range(group, rows + groups, groups):
        row = step + tl.full([], 0, tl.int64)
        if step < rows:
            mask_start = start_of_mask(row, mask_size_1, mask_size_2, mask_stride_0, mask_stride_1, mask_stride_2)
            limit = columns_seen(row, width, queries, CAUSAL)
            s = masked(x.to(tl.float32) * scale, mask_ptr, mask_start, column, inside, limit, CAUSAL, MASK_COLUMNS)
            largest = tl.max(s, axis=0)
            slots = slots_ptr + row * 2 * splits + split
            publish(slots, largest)
            publish(slots + splits, tl.sum(tl.exp(s - finite(largest)), axis=0))
        after = row + groups
        x = tl.load(x_ptr + after * stride_x + column, inside & (after < rows), other=0.0)
        if step != group:
            before = row - groups
            mask_start = start_of_mask(before, mask_size_1, mask_size_2, mask_stride_0, mask_stride_1, mask_stride_2)
            limit = columns_seen(before, width, queries, CAUSAL)
            s = load_scores(
                x_ptr + before * stride_x, mask_ptr, mask_start, column, inside, limit, scale, CAUSAL, MASK_COLUMNS
            )
            slots = slots_ptr + before * 2 * splits
            maxima = tl.where(tl.arange(0, SPLITS) < splits, gather(slots, splits, SPLITS), float("-inf"))
            largest = tl.max(maxima, axis=0)
            total = tl.sum(gather(slots + splits, splits, SPLITS) * tl.exp(maxima - finite(largest)), axis=0)
            y = s - largest - tl.log(total) if LOG else tl.exp(s - finite(largest)) * (1.0 / total)
            tl.store(y_ptr + before * width + column, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def start_of_mask(index, size_1, size_2, stride_0, stride_1, stride_2):
    """How far into the mask the values for a row begin."""
    outer = (index // (size_1 * size_2)).to(tl.int64)
    middle = (index // size_2 % size_1).to(tl.int64)
    return outer * stride_0 + middle * stride_1 + (index % size_2).to(tl.int64) * stride_2


@triton.jit
def columns_seen(index, width, queries, CAUSAL: tl.constexpr):
    """How many columns a row sees; none, or fewer, where there are more queries than columns."""
    return index % queries + width - queries + 1 if CAUSAL else index * 0 + width


@triton.jit
def load_scores(
    x_row, mask_ptr, mask_start, column, inside, limit, scale, CAUSAL: tl.constexpr, MASK_COLUMNS: tl.constexpr
):
    """s = x·scale + mask in float32, −inf where it is hidden or not inside the row."""
    s = load(x_row + column, near(column, inside, limit, CAUSAL)) * scale
    return masked(s, mask_ptr, mask_start, column, inside, limit, CAUSAL, MASK_COLUMNS)


@triton.jit
def masked(s, mask_ptr, mask_start, column, inside, limit, CAUSAL: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """s with the mask, −inf where it is hidden or not inside the row."""
    seen = inside & (column < limit) if CAUSAL else inside
    if mask_ptr is not None:
        values = load_mask(mask_ptr, mask_start, column, near(column, inside, limit, CAUSAL), MASK_COLUMNS)
        if mask_ptr.dtype.element_ty == tl.int1:
            seen = seen & values
        else:
            s += values.to(tl.float32)
    return tl.where(seen, s, float("-inf"))


@triton.jit
def load_mask(mask_ptr, mask_start, column, inside, MASK_COLUMNS: tl.constexpr):
    """The mask's values for a row."""
    return tl.load(mask_ptr + mask_start + (column if MASK_COLUMNS else column * 0), inside, other=0)


@triton.jit
def near(column, inside, limit, CAUSAL: tl.constexpr):
    """What to load: a limit at any column would make wide loads of 16 bytes into loads of one value."""
    return inside & (column < (limit + 15) // 16 * 16) if CAUSAL else inside


@triton.jit
def finite(largest):
    """The maximum to subtract: 0 for −inf, since −inf − (−inf) is NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)
