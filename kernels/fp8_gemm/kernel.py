"""fp8 linear, tile programs: rounding activations to e4m3, and y = (q · wᵀ) · w_scale · x_scale + bias.

An e4m3 number is carried as its byte, so that the same signatures serve a target that has no such type.
"""

import triton
import triton.language as tl


@triton.jit
def to_e4m3(y):
    """float32 → the byte of the nearest e4m3 number, ties to even; ±448 beyond that, 0x7F for NaN.

    In integers: exact on every target and in the interpreter.
    """
    clamped = tl.minimum(tl.abs(y), 448.0)
    bits = clamped.to(tl.uint32, bitcast=True)
    # The three upper of the 23 mantissa bits stay; the exponent's bias goes from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 e4m3 counts in steps of 2^-9, which is what float32 rounds to just above 2^14.
    subnormal = (clamped + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    sign = (y.to(tl.uint32, bitcast=True) >> 24) & 0x80
    code = tl.where(clamped < 0.015625, subnormal, normal) | sign
    return tl.where(y != y, 0x7F, code).to(tl.uint8)


@triton.jit
def to_float16(code):
    """The byte of an e4m3 number → float16, exactly: its fields fit, and the biases differ by 8."""
    code = code.to(tl.uint16)
    value = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def magnitude(x):
    """|x|, and 0 for NaN."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def quantize_rows(
    x_ptr,
    q_ptr,
    scale_ptr,
    rows,
    width,
    stride_x,
    DYNAMIC: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """x [rows, width] with any row stride → q [rows, width] contiguous, the e4m3 bytes of x / scale.

    ``DYNAMIC`` writes a scale a row, [rows] float32, the row's largest magnitude (NaN aside) over 448; else the one
    scale at ``scale_ptr`` is read. A row that fits one tile is read once.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    row_mask = row[:, None] < rows
    x_row = x_ptr + row[:, None] * stride_x
    q_row = q_ptr + row[:, None] * width
    column = tl.arange(0, BLOCK_N)[None, :]

    if ONE_TILE:
        x = tl.load(x_row + column, row_mask & (column < width), other=0.0).to(tl.float32)
    if DYNAMIC:
        if ONE_TILE:
            largest = magnitude(x)
        else:
            largest = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in range(0, width, BLOCK_N):
                x = tl.load(x_row + start + column, row_mask & (start + column < width), other=0.0).to(tl.float32)
                largest = tl.maximum(largest, magnitude(x))
        scale = tl.div_rn(tl.max(largest, axis=1), 448.0)
        scale = tl.maximum(scale, 1.1754943508222875e-38)  # 2^-126: a smaller one is subnormal, or 0
        tl.store(scale_ptr + row, scale, row < rows)
    else:
        scale = tl.load(scale_ptr + tl.zeros_like(row))

    for start in range(0, width, BLOCK_N):
        offset = start + column
        mask = row_mask & (offset < width)
        if not ONE_TILE:
            x = tl.load(x_row + offset, mask, other=0.0).to(tl.float32)
        tl.store(q_row + offset, to_e4m3(tl.div_rn(x, scale[:, None])), mask)


@triton.jit(do_not_specialize=["M", "stride_a_scale", "stride_b_scale"])
def fp8_gemm(
    a_ptr,
    b_ptr,
    y_ptr,
    a_scale_ptr,
    b_scale_ptr,
    bias_ptr,
    M,
    N,
    K,
    stride_am,
    stride_bn,
    stride_a_scale,
    stride_b_scale,
    HAS_BIAS: tl.constexpr,
    FP8_DOT: tl.constexpr,
    MAX_NUM_IMPRECISE_ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """a [M, K], b [N, K] e4m3 bytes, unit stride along K → y [M, N] contiguous.

    The scales are float32; a stride of 1 is one a row of a (of b), a stride of 0 one for the whole.
    ``FP8_DOT``: the target multiplies e4m3 itself; else the operands become float16, in which each is exact.
    Programs go down GROUP_SIZE_M rows of tiles before the next column, so that these share operands in L2.
    """
    program = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_in_group = GROUP_SIZE_M * tl.cdiv(N, BLOCK_N)
    first_m = program // tiles_in_group * GROUP_SIZE_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_SIZE_M)
    tile_m = first_m + program % tiles_in_group % group_m
    tile_n = program % tiles_in_group // group_m

    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    if FP8_DOT:
        a_ptr = a_ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        b_ptr = b_ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    # Rows and columns past the end repeat the last one; they are not stored.
    a_tile = a_ptr + tl.minimum(m, M - 1)[:, None] * stride_am + k[None, :]  # [BLOCK_M, BLOCK_K]
    b_tile = b_ptr + tl.minimum(n, N - 1)[None, :] * stride_bn + k[:, None]  # [BLOCK_K, BLOCK_N]

    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_tile + start, k[None, :] < K - start, other=0.0)
        b = tl.load(b_tile + start, k[:, None] < K - start, other=0.0)
        if FP8_DOT:
            accumulator = tl.dot(a, b, accumulator, max_num_imprecise_acc=MAX_NUM_IMPRECISE_ACC)
        else:
            accumulator = tl.dot(to_float16(a), to_float16(b), accumulator)

    b_scale = tl.load(b_scale_ptr + n * stride_b_scale, n < N, other=0.0)
    a_scale = tl.load(a_scale_ptr + m * stride_a_scale, m < M, other=0.0)
    y = accumulator * b_scale[None, :] * a_scale[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, n < N, other=0.0).to(tl.float32)[None, :]
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(y_ptr + m[:, None] * N + n[None, :], y.to(y_ptr.dtype.element_ty), mask)
