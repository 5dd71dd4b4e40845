"""Tile programs of the int4 linear: y = x · Wᵀ + bias and dx = dy · W, with W dequantized on the way to the dot.

The nibbles j and j + 4 of a packed word hold the weights of two neighbouring k (the layout is drawn in layout.py), so a
word's pair j joins to the two elements of one register of the dot operand, and pair j of a tile's words meets runs of
eight neighbouring activations: nothing is interleaved.
"""

import triton
import triton.language as tl


@triton.jit
def dequantize(words, shift, scale, offset):
    """scale·q + offset in float32, for the nibble of each word at bit ``shift``."""
    # 2^23 + q is the float32 whose low mantissa bits are q: exact, and cheaper than converting an integer.
    biased = ((words >> shift) & 15) | 0x4B000000
    return scale * (biased.to(tl.float32, bitcast=True) - 8388608.0) + offset


@triton.jit(do_not_specialize=["M"])
def int4_gemm_forward(
    x_ptr,
    q_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,
    M,
    N,
    K,
    groups,
    stride_row,
    GROUP_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """x [M, K] with any row stride, q [N, K/8] → y [M, N]; with SPLIT_K > 1 the sums of each split over K,
    partial [SPLIT_K, M, N] float32, all of it written here.

    GROUP_SIZE 0 is one group a row. The product is taken transposed, weights first, because wgmma reads its first
    operand from registers, where the weights are dequantized.
    """
    WORDS: tl.constexpr = BLOCK_K // 8
    blocks_m = tl.cdiv(M, BLOCK_M)
    # Neighbouring programs share a tile of weights: those are read from memory once.
    n = (tl.program_id(0) // blocks_m) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    m = (tl.program_id(0) % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)[None, :]
    split = tl.program_id(1)
    k_begin = split * tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    k_end = tl.minimum(K, k_begin + tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K)

    word = tl.arange(0, WORDS)[None, :]
    pair = tl.arange(0, 2 * WORDS)[:, None]
    k_of_pair = pair // 8 * 32 + pair % 8
    q_row = q_ptr + n * tl.multiple_of(K // 8, 4)
    x_row = x_ptr + m * stride_row
    scale_row = scale_ptr + n * groups
    offset_row = offset_ptr + n * groups
    if GROUP_SIZE == 0:
        scale = tl.load(scale_row, n < N, other=0.0).to(tl.float32)
        offset = tl.load(offset_row, n < N, other=0.0).to(tl.float32)

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(k_begin, k_end, BLOCK_K):
        inside = (n < N) & (k + word * 8 < k_end)
        words = tl.load(q_row + k // 8 + word, inside, other=0)
        if GROUP_SIZE > 0:
            if GROUP_SIZE % BLOCK_K == 0:
                scale = tl.load(scale_row + k // GROUP_SIZE, n < N, other=0.0).to(tl.float32)
                offset = tl.load(offset_row + k // GROUP_SIZE, n < N, other=0.0).to(tl.float32)
            else:
                group = (k + word * 8) // GROUP_SIZE
                scale = tl.load(scale_row + group, inside, other=0.0).to(tl.float32)
                offset = tl.load(offset_row + group, inside, other=0.0).to(tl.float32)
        for j in tl.static_range(4):
            even = dequantize(words, 4 * j, scale, offset)
            odd = dequantize(words, 4 * j + 16, scale, offset)
            # Triton 3.6 fails for sm_100 where nothing stands between a reshape and the dot: cast after it.
            w = tl.join(even, odd).reshape(BLOCK_N, 2 * WORDS).to(x_ptr.dtype.element_ty)
            k_pair = k + 8 * j + k_of_pair
            x = tl.load(x_row + k_pair, (m < M) & (k_pair < k_end), other=0.0)
            acc = tl.dot(w, x, acc, input_precision=PRECISION)

    mask = (m < M) & (n < N)
    if SPLIT_K > 1:
        tl.store(partial_ptr + (split * M.to(tl.int64) + m) * N + n, acc, mask)
    else:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, n < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + m * N + n, acc.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def int4_gemm_reduce(
    partial_ptr,
    bias_ptr,
    y_ptr,
    size,
    N,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y [size] = the sum of partial [SPLITS, size] in the order of the splits, plus bias [N] along the last dim."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial_ptr + split * size + i, i < size, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + i % N, i < size, other=0.0).to(tl.float32)
    tl.store(y_ptr + i, total.to(y_ptr.dtype.element_ty), i < size)


@triton.jit(do_not_specialize=["M"])
def int4_gemm_backward(
    dy_ptr,
    q_ptr,
    scale_ptr,
    offset_ptr,
    dx_ptr,
    M,
    N,
    K,
    groups,
    stride_row,
    GROUP_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dy [M, N] with any row stride → dx [M, K], the sum over n in one program."""
    blocks_m = tl.cdiv(M, BLOCK_M)
    m = (tl.program_id(0) % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    k = (tl.program_id(0) // blocks_m) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    word = k // 32 * 4 + k % 8 // 2
    shift = k % 32 // 8 * 4 + k % 2 * 16
    group = 0
    if GROUP_SIZE > 0:
        group = k // GROUP_SIZE

    acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N).to(tl.int64)
        row = n[:, None]
        inside = (row < N) & (k < K)
        words = tl.load(q_ptr + row * (K // 8) + word, inside, other=0)
        scale = tl.load(scale_ptr + row * groups + group, inside, other=0.0).to(tl.float32)
        offset = tl.load(offset_ptr + row * groups + group, inside, other=0.0).to(tl.float32)
        w = dequantize(words, shift, scale, offset).to(dy_ptr.dtype.element_ty)
        dy = tl.load(dy_ptr + m * stride_row + n[None, :], (m < M) & (n[None, :] < N), other=0.0)
        acc = tl.dot(dy, w, acc, input_precision=PRECISION)
    tl.store(dx_ptr + m * K + k, acc.to(dx_ptr.dtype.element_ty), (m < M) & (k < K))
