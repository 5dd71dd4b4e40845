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
def reciprocal_root_of_sum(total, x, width, eps):
    """:func:`reciprocal_root` of a row in registers, from the sum of its squares as they are.

    Where that sum left the range in which it is exact (or the row is 0), the squares are taken again, scaled.
    """
    rstd = tl.rsqrt(total / width + eps)
    if tl.max((in_range(total) == 0).to(tl.int32), axis=0) != 0:
        scale = scale_for(tl.max(tl.abs(x), axis=1))
        scaled = x * scale[:, None]
        rstd = reciprocal_root(tl.sum(scaled * scaled, axis=1), scale, width, eps)
    return rstd


@triton.jit
def in_range(total):
    """Whether a sum of squares neither overflowed nor lost what matters to underflow; false for NaN."""
    return (total > 1e-20) & (total < 1e37)


@triton.jit
def load(pointer, mask):
    """A tile in float32, 0 outside the mask."""
    return tl.load(pointer, mask, other=0.0).to(tl.float32)


@triton.jit
def publish(slot, value):
    """Put a float32 scalar into a slot (int64, 0 before) where :func:`gather` of other programs finds it."""
    word = (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (1 << 32)
    tl.atomic_xchg(slot, word, sem="relaxed")


@triton.jit
def gather(slots, count, COUNT: tl.constexpr):
    """What ``count`` programs publish in as many slots, once it is there; then zeros up to COUNT, a power of two.

    Value and flag are one 64-bit word, so that no fence is needed.
    """
    index = tl.arange(0, COUNT)
    values = tl.inline_asm_elementwise(
        """{
            .reg .pred waiting;
            .reg .b32 flag;
            .reg .b64 word;
            look:
            ld.relaxed.gpu.global.b64 word, [$1];
            mov.b64 {$0, flag}, word;
            setp.eq.u32 waiting, flag, 0;
            @waiting bra look;
        }""",
        "=r,l",
        [slots + tl.where(index < count, index, 0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    return tl.where(index < count, values.to(tl.float32, bitcast=True), 0.0)


@triton.jit(do_not_specialize=["count"])
def sum_partials(
    partials_ptr, first_ptr, second_ptr, count, width, stride_second, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Sums over the first axis of partials [count, width] float32 → first [width].

    Along the grid's second axis, of the partials ``stride_second`` numbers on → second.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    base = partials_ptr + tl.program_id(1).to(tl.int64) * stride_second
    total = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for start in range(0, count, BLOCK_P):
        index = (start + tl.arange(0, BLOCK_P).to(tl.int64))[:, None]
        total += tl.load(base + index * width + column, (index < count) & (column < width), other=0.0)
    result = tl.sum(total, axis=0, keep_dims=True)
    if tl.program_id(1) == 0:
        tl.store(first_ptr + column, result.to(first_ptr.dtype.element_ty), column < width)
    elif second_ptr is not None:
        tl.store(second_ptr + column, result.to(second_ptr.dtype.element_ty), column < width)
