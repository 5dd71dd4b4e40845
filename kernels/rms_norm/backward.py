"""RMSNorm tile programs of the backward pass: dx, and each program's share of dw.

dx = rstd·(g − x̂·mean(g·x̂)) with x̂ = x·rstd, g = dy·w;  dw = Σ over rows of dy·x̂.
"""

import triton
import triton.language as tl

from fusedops.runtime.tile import gather, load, publish, sum_partials

__all__ = ["rms_norm_backward", "rms_norm_backward_split", "sum_partials"]


@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward(
    dy_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    dsum_ptr,
    dx_ptr,
    dw_ptr,
    rows,
    width,
    stride_dy,
    stride_x,
    stride_dsum,
    weight_offset,
    ONE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx [rows, width] contiguous; dw [programs, width], all of it written here (None: not wanted).

    Program p takes the row blocks p, p + programs, …, in order, so that two runs add the same numbers the same way.
    dsum is the gradient of x itself (the new residual's), which is added to dx; None for none.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_N)[None, :]
    blocks = tl.cdiv(rows, BLOCK_M)
    if ONE_TILE:
        w = load_weight(w_ptr, column, width, weight_offset)
        dw = tl.zeros([1, BLOCK_N], tl.float32)
        row = (program * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
        rstd = tl.load(rstd_ptr + row, row < rows, other=0.0)
        for block in tl.range(program, blocks, tl.num_programs(0), num_stages=STAGES):
            row = (block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
            mask = (row < rows) & (column < width)
            x_hat = load(x_ptr + row * stride_x + column, mask) * rstd
            dy = load(dy_ptr + row * stride_dy + column, mask)
            g = dy * w
            mean = tl.sum(g * x_hat, axis=1, keep_dims=True) / width
            store_dx(dx_ptr, dsum_ptr, row, column, mask, rstd * (g - x_hat * mean), width, stride_dsum)
            if dw_ptr is not None:
                dw += tl.sum(dy * x_hat, axis=0, keep_dims=True)
            following = row + tl.num_programs(0) * BLOCK_M
            rstd = tl.load(rstd_ptr + following, following < rows, other=0.0)
        if dw_ptr is not None:
            tl.store(dw_ptr + program.to(tl.int64) * width + column, dw.to(dw_ptr.dtype.element_ty), column < width)
    else:
        for block in range(program, blocks, tl.num_programs(0)):
            row = (block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
            rstd = tl.load(rstd_ptr + row, row < rows, other=0.0)
            products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in tl.range(0, width, BLOCK_N, num_stages=STAGES):
                offset = start + column
                mask = (row < rows) & (offset < width)
                g = load(dy_ptr + row * stride_dy + offset, mask)
                w = load_weight(w_ptr, offset, width, weight_offset)
                g *= w
                products += g * (load(x_ptr + row * stride_x + offset, mask) * rstd)
            mean = tl.sum(products, axis=1, keep_dims=True) / width
            last = (tl.cdiv(width, BLOCK_N) - 1) * BLOCK_N
            for back in tl.range(0, width, BLOCK_N, num_stages=STAGES):
                offset = last - back + column
                mask = (row < rows) & (offset < width)
                x_hat = load(x_ptr + row * stride_x + offset, mask) * rstd
                dy = load(dy_ptr + row * stride_dy + offset, mask)
                w = load_weight(w_ptr, offset, width, weight_offset)
                g = dy * w
                store_dx(dx_ptr, dsum_ptr, row, offset, mask, rstd * (g - x_hat * mean), width, stride_dsum)
                if dw_ptr is not None:
                    dw_row = dw_ptr + program.to(tl.int64) * width + offset
                    share = tl.sum(dy * x_hat, axis=0, keep_dims=True)
                    share += tl.load(dw_row, (offset < width) & (block != program), other=0.0).to(tl.float32)
                    tl.store(dw_row, share.to(dw_ptr.dtype.element_ty), offset < width)


@triton.jit(do_not_specialize=["rows", "splits"])
def rms_norm_backward_split(
    dy_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    dsum_ptr,
    dx_ptr,
    dw_ptr,
    slots_ptr,
    rows,
    width,
    chunk,
    splits,
    stride_dy,
    stride_x,
    stride_dsum,
    weight_offset,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """:func:`rms_norm_backward` of wide rows: ``splits`` programs share a row, each with ``chunk`` of its columns.

    So a row is read once, and dw stays in registers. The programs of a row exchange their shares of mean(g·x̂)
    through slots [rows, splits] int64, 0 before the launch; all programs must be resident (a cooperative launch).
    A share has the time of a whole step to travel; by then its row comes from L1 or L2. ``SPLITS``: the power of two
    from ``splits`` on.
    """
    split = tl.program_id(0) % splits
    group = tl.program_id(0) // splits
    groups = tl.num_programs(0) // splits
    column = split * chunk + tl.arange(0, BLOCK_N)
    inside = (tl.arange(0, BLOCK_N) < chunk) & (column < width)
    w = load_weight(w_ptr, column, width, weight_offset)
    dw = tl.zeros([BLOCK_N], tl.float32)
    row = group.to(tl.int64)
    x = tl.load(x_ptr + row * stride_x + column, inside & (row < rows), other=0.0)
    dy = tl.load(dy_ptr + row * stride_dy + column, inside & (row < rows), other=0.0)
    rstd = tl.load(rstd_ptr + row, row < rows, other=0.0)
    # One step more than there are rows: a step begins a row, loads the next one and finishes the one before.
    for step in range(group, rows + groups, groups):
        row = step + tl.full([], 0, tl.int64)
        g = dy.to(tl.float32) * w
        share = tl.sum(g * (x.to(tl.float32) * rstd), axis=0)
        if step < rows:
            publish(slots_ptr + row * splits + split, share)
        after = row + groups
        x = tl.load(x_ptr + after * stride_x + column, inside & (after < rows), other=0.0)
        dy = tl.load(dy_ptr + after * stride_dy + column, inside & (after < rows), other=0.0)
        before = row - groups
        if step != group:
            # Not carried over from the step before: Triton 3.6 then takes the first row's for every row.
            rstd_before = tl.load(rstd_ptr + before)
            mean = tl.sum(gather(slots_ptr + before * splits, splits, SPLITS), axis=0) / width
            dy_before = load(dy_ptr + before * stride_dy + column, inside)
            x_hat = load(x_ptr + before * stride_x + column, inside) * rstd_before
            g = dy_before * w
            store_dx(dx_ptr, dsum_ptr, before, column, inside, rstd_before * (g - x_hat * mean), width, stride_dsum)
            dw += dy_before * x_hat
        rstd = tl.load(rstd_ptr + after, after < rows, other=0.0)
    if dw_ptr is not None:
        tl.store(dw_ptr + group.to(tl.int64) * width + column, dw.to(dw_ptr.dtype.element_ty), inside)


@triton.jit
def store_dx(dx_ptr, dsum_ptr, row, column, mask, dx, width, stride_dsum):
    """dx of some columns, plus the residual's own gradient."""
    if dsum_ptr is not None:
        dx += load(dsum_ptr + row * stride_dsum + column, mask)
    tl.store(dx_ptr + row * width + column, dx.to(dx_ptr.dtype.element_ty), mask)


@triton.jit
def load_weight(w_ptr, offset, width, weight_offset):
    """weight_offset + w in float32; 1 without a weight."""
    w = 1.0
    if w_ptr is not None:
        w = load(w_ptr + offset, offset < width) + weight_offset
    return w
