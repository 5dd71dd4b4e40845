"""Cross-entropy tile programs: losses and the gradient of the logits in one launch, and what surrounds it.

A program owns whole rows of logits, and walks over the rows with the stride of the grid. A row that fits one tile
(``ONE_TILE``) is read once and stays in registers; a wider one is walked twice: an online softmax (Milakov & Gimelshein
2018), then, where a gradient is wanted, a second walk whose reads come from L2.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def cross_entropy_forward(
    x_ptr,
    target_ptr,
    upstream_ptr,
    count_ptr,
    loss_ptr,
    dx_ptr,
    rows,
    classes,
    stride_x,
    ignore_index,
    smoothing,
    z_loss,
    SMOOTH: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Logits x [rows, classes] with any row stride, target [rows] → loss [rows] float32, dx [rows, classes] contiguous.

    dx is the gradient of upstream[row]·loss[row] / count (each 1 where it is None); None for no gradient. It may be x
    itself: a tile is written after all reads of it. An ignored row has loss 0 and gradient 0 and is not read; a target
    that is no class makes both NaN.
    """
    column = tl.arange(0, BLOCK_N)[None, :]
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        row = (block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
        target = tl.load(target_ptr + row, row < rows, other=0).to(tl.int64)
        kept = (row < rows) & (target != ignore_index)
        x_row = x_ptr + row * stride_x

        if ONE_TILE:
            x = load_logits(x_row + column, kept & (column < classes))
            shift = finite(tl.max(x, axis=1, keep_dims=True))
            exponential = tl.exp(x - shift)
            total = tl.sum(exponential, axis=1, keep_dims=True)
            x_target = tl.sum(tl.where(column == target, x, 0.0), axis=1, keep_dims=True)
            below = 0.0
            if SMOOTH:
                below = tl.sum(tl.where(column < classes, x - shift, 0.0), axis=1, keep_dims=True)
        else:
            largest = tl.full([BLOCK_M, 1], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M, 1], tl.float32)
            x_target = tl.zeros([BLOCK_M, 1], tl.float32)
            below = tl.zeros([BLOCK_M, 1], tl.float32)  # Σ (x − largest), of which no term cancels another
            for start in tl.range(0, classes, BLOCK_N):
                offset = start + column
                x = load_logits(x_row + offset, kept & (offset < classes))
                before = largest  # −inf at first, so that the first rescaling is by 0
                largest = tl.maximum(largest, tl.max(x, axis=1, keep_dims=True))
                shift = finite(largest)
                total = total * tl.exp(before - shift) + tl.sum(tl.exp(x - shift), axis=1, keep_dims=True)
                x_target += tl.sum(tl.where(offset == target, x, 0.0), axis=1, keep_dims=True)
                if SMOOTH:
                    below += start * (finite(before) - shift)
                    below += tl.sum(tl.where(offset < classes, x - shift, 0.0), axis=1, keep_dims=True)
            shift = finite(largest)

        log_total = tl.log(total)
        lse = shift + log_total
        loss = log_total + (1.0 - smoothing) * (shift - x_target) + z_loss * lse * lse
        if SMOOTH:
            loss -= smoothing / classes * below
        is_class = (target >= 0) & (target < classes)
        tl.store(loss_ptr + row, tl.where(kept, tl.where(is_class, loss, float("nan")), 0.0), row < rows)

        if dx_ptr is not None:
            factor = tl.where(is_class, 1.0, float("nan"))
            if upstream_ptr is not None:
                factor *= tl.load(upstream_ptr + row, kept, other=0.0).to(tl.float32)
            if count_ptr is not None:
                factor /= tl.load(count_ptr)
            slope = (1.0 + 2.0 * z_loss * lse) / total
            if ONE_TILE:
                dx = less_wanted(exponential * slope, column, target, smoothing, classes) * factor
                dx = tl.where(kept, dx, 0.0).to(dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + row * classes + column, dx, (row < rows) & (column < classes))
            else:
                # Backwards: what was read last is nearest.
                last = (tl.cdiv(classes, BLOCK_N) - 1) * BLOCK_N
                for back in tl.range(0, classes, BLOCK_N):
                    offset = last - back + column
                    x = load_logits(x_row + offset, kept & (offset < classes))
                    dx = less_wanted(tl.exp(x - shift) * slope, offset, target, smoothing, classes) * factor
                    dx = tl.where(kept, dx, 0.0).to(dx_ptr.dtype.element_ty)
                    tl.store(dx_ptr + row * classes + offset, dx, (row < rows) & (offset < classes))


@triton.jit
def load_logits(pointer, mask):
    """A tile in float32, −inf outside the mask."""
    return tl.load(pointer, mask, other=float("-inf")).to(tl.float32)


@triton.jit
def finite(largest):
    """What to subtract before exponentiating: the largest logit so far, 0 where all were −inf."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def less_wanted(p, column, target, smoothing, classes):
    """p minus what the loss asks for, the target's probability mixed with uniform ones: of one class exactly 0."""
    return (p - smoothing / classes) - tl.where(column == target, 1.0 - smoothing, 0.0)


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def cross_entropy_backward(
    dlogits_ptr,
    target_ptr,
    upstream_ptr,
    count_ptr,
    out_ptr,
    rows,
    classes,
    stride_upstream,
    ignore_index,
    IN_PLACE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out = dlogits · upstream / count by rows, [rows, classes] contiguous; 0 in ignored rows whatever upstream is.

    ``IN_PLACE``: out is dlogits, and rows whose factor is 1 are left as they are, without a host that knows the factor.
    """
    column = tl.arange(0, BLOCK_N)[None, :]
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        row = (block * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64))[:, None]
        kept = (row < rows) & (tl.load(target_ptr + row, row < rows, other=0).to(tl.int64) != ignore_index)
        factor = tl.load(upstream_ptr + row * stride_upstream, kept, other=1.0).to(tl.float32)
        if count_ptr is not None:
            factor = tl.where(kept, factor / tl.load(count_ptr), 1.0)
        changes = tl.max(tl.max((factor != 1.0).to(tl.int32), axis=1), axis=0) != 0
        if (not IN_PLACE) or changes:
            for start in tl.range(0, classes, BLOCK_N):
                offset = start + column
                mask = (row < rows) & (offset < classes)
                dlogits = tl.load(dlogits_ptr + row * classes + offset, mask & kept, other=0.0).to(tl.float32)
                tl.store(out_ptr + row * classes + offset, (dlogits * factor).to(out_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def cross_entropy_count(target_ptr, count_ptr, rows, ignore_index, BLOCK: tl.constexpr):
    """The number of targets that are not ignored, as a float32: one program."""
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + row, row < rows, other=0).to(tl.int64)
        count += ((row < rows) & (target != ignore_index)).to(tl.int32)
    tl.store(count_ptr, tl.sum(count, axis=0).to(tl.float32))


@triton.jit(do_not_specialize=["rows"])
def cross_entropy_total(loss_ptr, count_ptr, out_ptr, rows, BLOCK: tl.constexpr):
    """The sum of the losses [rows], over count where that is not None: one program, always the same order."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(loss_ptr + row, row < rows, other=0.0)
    result = tl.sum(total, axis=0)
    if count_ptr is not None:
        result /= tl.load(count_ptr)
    tl.store(out_ptr, result.to(out_ptr.dtype.element_ty))
