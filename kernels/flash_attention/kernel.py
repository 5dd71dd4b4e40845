"""FlashAttention-2 tile programs, forward and backward, with pointer loads for every GPU that Triton knows.

Query ``i`` sees the keys ``j ≤ i + diagonal``: 0 aligns the causal mask top-left, ``seq_kv − seq_q`` bottom-right, and
with ``seq_kv`` every query sees every key. So one binary serves them all, and only the tiles that the diagonal or the
end of the keys crosses (``MASKED``) pay for the comparison.

Scores are kept in units of log2(e): exp(softmax_scale·s) = exp2(scale_log2·s). A row that sees no key has lse = −inf.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
SIZES = ["heads", "group", "seq_q", "seq_kv", "diagonal"]  # one binary for all of them, also for 1 and multiples of 16


@triton.constexpr_function
def padded(head_dim):
    """The width of a tile that holds a head: tl.dot takes powers of two from 16."""
    return max(16, triton.next_power_of_2(head_dim))


@triton.jit
def load_tile(p_tile, row, rows, WIDTH: tl.constexpr, ALL_ROWS: tl.constexpr):
    """The tile at the pointers ``p_tile`` [BLOCK, padded(WIDTH)], 0 past ``rows`` and past ``WIDTH``."""
    column = tl.arange(0, p_tile.shape[1])[None, :]
    if ALL_ROWS:
        if p_tile.shape[1] == WIDTH:
            return tl.load(p_tile)
        return tl.load(p_tile, column < WIDTH, other=0.0)
    if p_tile.shape[1] == WIDTH:
        return tl.load(p_tile, row[:, None] < rows, other=0.0)
    return tl.load(p_tile, (row[:, None] < rows) & (column < WIDTH), other=0.0)


@triton.jit
def store_tile(p_tile, tile, row, rows, WIDTH: tl.constexpr):
    """The inverse of :func:`load_tile`, in the dtype that the pointers have."""
    column = tl.arange(0, p_tile.shape[1])[None, :]
    tl.store(p_tile, tile.to(p_tile.dtype.element_ty), (row[:, None] < rows) & (column < WIDTH))


@triton.jit
def visible_keys(first_row, seq_kv, diagonal, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the key tiles end that all rows of a query block see in full, and where the keys end that any row sees."""
    seen_by_all = tl.maximum(tl.minimum(seq_kv, first_row + diagonal + 1), 0)
    return seen_by_all // BLOCK_N * BLOCK_N, tl.minimum(seq_kv, first_row + BLOCK_M + diagonal)


@triton.jit
def attend(
    accumulator,
    total,
    largest,
    q,
    p_k,
    p_v,
    row,
    first,
    stop,
    seq_kv,
    diagonal,
    stride_ks,
    stride_vs,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    MASKED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The online softmax over the keys ``first`` to ``stop``: Σ exp2(s − largest)·v, Σ exp2(s − largest), largest."""
    for start in range(first, stop, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k = load_tile(p_k + start * stride_ks, key, seq_kv, HEAD_DIM, not MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            visible = (key[None, :] < seq_kv) & (key[None, :] <= row[:, None] + diagonal)
            s = tl.where(visible, s, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(s, axis=1) * scale_log2)
        shift = new_largest
        if MASKED:
            shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        p = tl.exp2(s * scale_log2 - shift[:, None])
        correction = tl.exp2(largest - shift)
        total = total * correction + tl.sum(p, axis=1)
        v = load_tile(p_v + start * stride_vs, key, seq_kv, HEAD_DIM_V, not MASKED)
        accumulator = tl.dot(
            p.to(v.dtype), v, accumulator * correction[:, None], input_precision=INPUT_PRECISION
        )  # [BLOCK_M, BLOCK_DV]
        largest = new_largest
    return accumulator, total, largest


@triton.jit(do_not_specialize=SIZES)
def flash_attention_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    softmax_scale,
    heads,
    group,
    seq_q,
    seq_kv,
    diagonal,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qs: tl.int64,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_ks: tl.int64,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vs: tl.int64,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out [batch, heads, seq_q, HEAD_DIM_V] and lse [batch, heads, seq_q] float32, contiguous; heads are query heads.

    A program owns a block of queries of a head. The blocks of a head are neighbours, so that its keys stay in L2; the
    last goes first, because under a causal mask it has the most keys.
    """
    blocks = tl.cdiv(seq_q, BLOCK_M)
    first_row = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    index = tl.program_id(0) // blocks
    batch = index // heads
    head = index % heads

    row = first_row + tl.arange(0, BLOCK_M)
    key = tl.arange(0, BLOCK_N)[:, None]
    column = tl.arange(0, padded(HEAD_DIM))[None, :]
    column_v = tl.arange(0, padded(HEAD_DIM_V))[None, :]
    p_q = q_ptr + batch * stride_qb + head * stride_qh + row[:, None] * stride_qs + column
    p_k = k_ptr + batch * stride_kb + head // group * stride_kh + key * stride_ks + column
    p_v = v_ptr + batch * stride_vb + head // group * stride_vh + key * stride_vs + column_v
    scale_log2 = softmax_scale * LOG2_E

    q = load_tile(p_q, row, seq_q, HEAD_DIM, False)
    accumulator = tl.zeros([BLOCK_M, padded(HEAD_DIM_V)], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    full_end, end = visible_keys(first_row, seq_kv, diagonal, BLOCK_M, BLOCK_N)
    for MASKED in tl.static_range(2):
        accumulator, total, largest = attend(
            accumulator,
            total,
            largest,
            q,
            p_k,
            p_v,
            row,
            full_end if MASKED else 0,
            end if MASKED else full_end,
            seq_kv,
            diagonal,
            stride_ks,
            stride_vs,
            scale_log2,
            HEAD_DIM,
            HEAD_DIM_V,
            MASKED,
            INPUT_PRECISION,
            BLOCK_N,
        )

    total = tl.where(total > 0, total, 1.0)  # a row that sees no key: 0 / 1, and −inf + 0
    lse = (largest + tl.log2(total)) * LN_2
    tl.store(lse_ptr + index.to(tl.int64) * seq_q + row, lse, row < seq_q)
    out = accumulator / total[:, None]
    p_out = out_ptr + (index.to(tl.int64) * seq_q + row[:, None]) * HEAD_DIM_V + column_v
    store_tile(p_out, out, row, seq_q, HEAD_DIM_V)


@triton.jit
def load_lse(p_lse, row, seq_q):
    """lse in units of log2(e), and +inf where no key is visible, so that exp2(s − lse) is 0 there and never NaN."""
    lse = tl.load(p_lse, row < seq_q, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


@triton.jit
def differentiate_query(
    dq,
    q,
    do,
    lse,
    delta,
    p_k,
    p_v,
    row,
    first,
    stop,
    seq_kv,
    diagonal,
    stride_ks,
    stride_vs,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    MASKED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dq / softmax_scale over the keys ``first`` to ``stop``."""
    for start in range(first, stop, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k = load_tile(p_k + start * stride_ks, key, seq_kv, HEAD_DIM, not MASKED)
        v = load_tile(p_v + start * stride_vs, key, seq_kv, HEAD_DIM_V, not MASKED)
        s = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            visible = (key[None, :] < seq_kv) & (key[None, :] <= row[:, None] + diagonal)
            s = tl.where(visible, s, float("-inf"))
        p = tl.exp2(s * scale_log2 - lse[:, None])
        dp = tl.dot(do, tl.trans(v), input_precision=INPUT_PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=INPUT_PRECISION)
    return dq


@triton.jit(do_not_specialize=SIZES)
def flash_attention_backward_dq(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    do_ptr,
    dq_ptr,
    delta_ptr,
    softmax_scale,
    heads,
    group,
    seq_q,
    seq_kv,
    diagonal,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qs: tl.int64,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_ks: tl.int64,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vs: tl.int64,
    stride_dob: tl.int64,
    stride_doh: tl.int64,
    stride_dos: tl.int64,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dq [batch, heads, seq_q, HEAD_DIM], and delta = Σ dout·out [batch, heads, seq_q] float32 for the other kernel.

    The programs are those of the forward pass.
    """
    blocks = tl.cdiv(seq_q, BLOCK_M)
    first_row = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    index = tl.program_id(0) // blocks
    batch = index // heads
    head = index % heads

    row = first_row + tl.arange(0, BLOCK_M)
    key = tl.arange(0, BLOCK_N)[:, None]
    column = tl.arange(0, padded(HEAD_DIM))[None, :]
    column_v = tl.arange(0, padded(HEAD_DIM_V))[None, :]
    p_q = q_ptr + batch * stride_qb + head * stride_qh + row[:, None] * stride_qs + column
    p_do = do_ptr + batch * stride_dob + head * stride_doh + row[:, None] * stride_dos + column_v
    p_k = k_ptr + batch * stride_kb + head // group * stride_kh + key * stride_ks + column
    p_v = v_ptr + batch * stride_vb + head // group * stride_vh + key * stride_vs + column_v
    flat_row = index.to(tl.int64) * seq_q + row

    q = load_tile(p_q, row, seq_q, HEAD_DIM, False)
    do = load_tile(p_do, row, seq_q, HEAD_DIM_V, False)
    out = load_tile(out_ptr + flat_row[:, None] * HEAD_DIM_V + column_v, row, seq_q, HEAD_DIM_V, False)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), axis=1)
    tl.store(delta_ptr + flat_row, delta, row < seq_q)
    lse = load_lse(lse_ptr + flat_row, row, seq_q)

    dq = tl.zeros([BLOCK_M, padded(HEAD_DIM)], tl.float32)
    full_end, end = visible_keys(first_row, seq_kv, diagonal, BLOCK_M, BLOCK_N)
    for MASKED in tl.static_range(2):
        dq = differentiate_query(
            dq,
            q,
            do,
            lse,
            delta,
            p_k,
            p_v,
            row,
            full_end if MASKED else 0,
            end if MASKED else full_end,
            seq_kv,
            diagonal,
            stride_ks,
            stride_vs,
            softmax_scale * LOG2_E,
            HEAD_DIM,
            HEAD_DIM_V,
            MASKED,
            INPUT_PRECISION,
            BLOCK_N,
        )
    store_tile(dq_ptr + flat_row[:, None] * HEAD_DIM + column, dq * softmax_scale, row, seq_q, HEAD_DIM)


@triton.jit
def differentiate_key_value(
    dk,
    dv,
    k,
    v,
    p_q,
    p_do,
    p_lse,
    p_delta,
    key,
    first,
    stop,
    seq_q,
    diagonal,
    stride_qs,
    stride_dos,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    MASKED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """dk / softmax_scale and dv over the queries ``first`` to ``stop``, with the tiles of scores transposed.

    Keys past the end need no mask: what they make reaches only rows of dk and dv that nobody stores.
    """
    for start in range(first, stop, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        q = load_tile(p_q + start * stride_qs, row, seq_q, HEAD_DIM, False)
        do = load_tile(p_do + start * stride_dos, row, seq_q, HEAD_DIM_V, False)
        lse = load_lse(p_lse + row, row, seq_q)
        delta = tl.load(p_delta + row, row < seq_q, other=0.0)
        s = tl.dot(k, tl.trans(q), input_precision=INPUT_PRECISION)  # [BLOCK_N, BLOCK_M]
        if MASKED:
            s = tl.where(key[:, None] <= row[None, :] + diagonal, s, float("-inf"))
        p = tl.exp2(s * scale_log2 - lse[None, :])
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=INPUT_PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=INPUT_PRECISION)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=INPUT_PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def flash_attention_backward_dkdv(
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    do_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    softmax_scale,
    heads,
    group,
    seq_q,
    seq_kv,
    diagonal,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qs: tl.int64,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_ks: tl.int64,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vs: tl.int64,
    stride_dob: tl.int64,
    stride_doh: tl.int64,
    stride_dos: tl.int64,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dk [batch, heads, seq_kv, HEAD_DIM] and dv [batch, heads, seq_kv, HEAD_DIM_V]; heads are key/value heads.

    A program owns a block of keys and adds over the queries of all ``group`` query heads, in order and in float32.
    """
    blocks = tl.cdiv(seq_kv, BLOCK_N)
    first_key = tl.program_id(0) % blocks * BLOCK_N
    index = tl.program_id(0) // blocks
    batch = index // heads
    head_kv = index % heads

    key = first_key + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)[:, None]
    column = tl.arange(0, padded(HEAD_DIM))[None, :]
    column_v = tl.arange(0, padded(HEAD_DIM_V))[None, :]
    p_k = k_ptr + batch * stride_kb + head_kv * stride_kh + key[:, None] * stride_ks + column
    p_v = v_ptr + batch * stride_vb + head_kv * stride_vh + key[:, None] * stride_vs + column_v
    k = load_tile(p_k, key, seq_kv, HEAD_DIM, False)
    v = load_tile(p_v, key, seq_kv, HEAD_DIM_V, False)

    # Query i sees key j from i = j − diagonal on: the block's first key starts the queries, its last ends the mask.
    first_row = tl.maximum(first_key - diagonal, 0) // BLOCK_M * BLOCK_M
    last_key = tl.minimum(first_key + BLOCK_N, seq_kv) - 1
    first_full = tl.cdiv(tl.maximum(last_key - diagonal, 0), BLOCK_M) * BLOCK_M

    dk = tl.zeros([BLOCK_N, padded(HEAD_DIM)], tl.float32)
    dv = tl.zeros([BLOCK_N, padded(HEAD_DIM_V)], tl.float32)
    for member in range(group):
        head = head_kv * group + member
        flat_row = (index.to(tl.int64) * group + member) * seq_q
        p_q = q_ptr + batch * stride_qb + head * stride_qh + row * stride_qs + column
        p_do = do_ptr + batch * stride_dob + head * stride_doh + row * stride_dos + column_v
        for MASKED in tl.static_range(2):
            dk, dv = differentiate_key_value(
                dk,
                dv,
                k,
                v,
                p_q,
                p_do,
                lse_ptr + flat_row,
                delta_ptr + flat_row,
                key,
                first_row if MASKED else first_full,
                tl.minimum(first_full, seq_q) if MASKED else seq_q,
                seq_q,
                diagonal,
                stride_qs,
                stride_dos,
                softmax_scale * LOG2_E,
                HEAD_DIM,
                HEAD_DIM_V,
                MASKED,
                INPUT_PRECISION,
                BLOCK_M,
            )
    flat_key = index.to(tl.int64) * seq_kv + key[:, None]
    store_tile(dk_ptr + flat_key * HEAD_DIM + column, dk * softmax_scale, key, seq_kv, HEAD_DIM)
    store_tile(dv_ptr + flat_key * HEAD_DIM_V + column_v, dv, key, seq_kv, HEAD_DIM_V)
