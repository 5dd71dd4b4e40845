"""FlashAttention-2 backward (Dao 2023, algorithm 2), portable Triton, deterministic: no atomics.

With P = exp(S − lse), dP = dO·Vᵀ and delta = rowsum(dO∘O): dS = P∘(dP − delta), and

    dV = Pᵀ·dO        dK = scale·dSᵀ·Q        dQ = scale·dS·K

One kernel owns keys and walks the queries, over all query heads that share the kv head; the other owns queries.
"""

import triton
import triton.language as tl

from .forward import SIZES


@triton.jit(do_not_specialize=["heads_q", "seq_q"])
def attention_delta(
    out_ptr,
    dout_ptr,
    delta_ptr,
    stride_db,
    stride_dh,
    stride_dm,
    heads_q,
    seq_q,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta [batch, heads_q, seq_q] float32 = rowsum(dout ∘ out); grid (blocks of queries · batch · heads_q)."""
    BLOCK_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    blocks = tl.cdiv(seq_q, BLOCK_M)
    head_index = tl.program_id(0) // blocks
    rows = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    dv = tl.arange(0, BLOCK_DV)
    mask = (rows[:, None] < seq_q) & (dv[None, :] < HEAD_DIM_V)
    head_rows = head_index.to(tl.int64) * seq_q + rows
    dout_base = (
        dout_ptr + (head_index // heads_q).to(tl.int64) * stride_db + (head_index % heads_q).to(tl.int64) * stride_dh
    )
    out = tl.load(out_ptr + head_rows[:, None] * HEAD_DIM_V + dv[None, :], mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_base + rows[:, None].to(tl.int64) * stride_dm + dv[None, :], mask, other=0.0).to(tl.float32)
    tl.store(delta_ptr + head_rows, tl.sum(out * dout, 1), rows < seq_q)


@triton.jit
def load_tile(base, index, stride, column, limit, WIDTH: tl.constexpr):
    """Rows ``index`` of a matrix with unit column stride; 0 beyond ``limit`` rows and WIDTH columns."""
    mask = (index[:, None] < limit) & (column[None, :] < WIDTH)
    return tl.load(base + index[:, None].to(tl.int64) * stride + column[None, :], mask, other=0.0)


@triton.jit
def load_lse(lse_ptr, index, limit):
    """lse in base 2; +inf for queries that see no key or do not exist, so that their P is 0."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    lse = tl.load(lse_ptr + index, index < limit, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse) * LOG2_E


@triton.jit(do_not_specialize=SIZES)
def attention_backward_kv(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_db,
    stride_dh,
    stride_dm,
    batch,
    heads_q,
    heads_kv,
    seq_q,
    seq_kv,
    scale,
    causal_shift,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dk [batch, heads_kv, seq_kv, HEAD_DIM] and dv [batch, heads_kv, seq_kv, HEAD_DIM_V], contiguous."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    BLOCK_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    head_index = tl.program_id(0) % (batch * heads_kv)
    first_key = tl.program_id(0) // (batch * heads_kv) * BLOCK_N
    b = (head_index // heads_kv).to(tl.int64)
    kv_head = (head_index % heads_kv).to(tl.int64)
    group = heads_q // heads_kv
    keys = first_key + tl.arange(0, BLOCK_N)
    d_column = tl.arange(0, BLOCK_D)
    dv_column = tl.arange(0, BLOCK_DV)
    k = load_tile(k_ptr + b * stride_kb + kv_head * stride_kh, keys, stride_kn, d_column, seq_kv, HEAD_DIM)  # [N, D]
    v = load_tile(
        v_ptr + b * stride_vb + kv_head * stride_vh, keys, stride_vn, dv_column, seq_kv, HEAD_DIM_V
    )  # [N, DV]
    scale_log2 = scale * 1.4426950408889634

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    first_query = tl.maximum(first_key - causal_shift, 0) // BLOCK_M * BLOCK_M if CAUSAL else 0
    for g in range(group):
        h = kv_head * group + g
        q_base = q_ptr + b * stride_qb + h * stride_qh
        dout_base = dout_ptr + b * stride_db + h * stride_dh
        statistics = (b * heads_q + h) * seq_q
        for start in range(first_query, seq_q, BLOCK_M):
            queries = start + tl.arange(0, BLOCK_M)
            q = load_tile(q_base, queries, stride_qm, d_column, seq_q, HEAD_DIM)  # [M, D]
            dout = load_tile(dout_base, queries, stride_dm, dv_column, seq_q, HEAD_DIM_V)  # [M, DV]
            lse = load_lse(lse_ptr + statistics, queries, seq_q)
            delta = tl.load(delta_ptr + statistics + queries, queries < seq_q, other=0.0)
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale_log2  # [N, M]
            if CAUSAL:
                scores = tl.where(keys[:, None] <= queries[None, :] + causal_shift, scores, float("-inf"))
            p = tl.exp2(scores - lse[None, :])
            dv += tl.dot(p.to(dout.dtype), dout, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
            ds = p * (dp - delta[None, :])
            dk += tl.dot(ds.to(q.dtype), q, input_precision=PRECISION)

    out_rows = (head_index.to(tl.int64) * seq_kv + keys)[:, None]
    within = keys[:, None] < seq_kv
    tl.store(
        dk_ptr + out_rows * HEAD_DIM + d_column[None, :],
        (dk * scale).to(dk_ptr.dtype.element_ty),
        within & (d_column[None, :] < HEAD_DIM),
    )
    tl.store(
        dv_ptr + out_rows * HEAD_DIM_V + dv_column[None, :],
        dv.to(dv_ptr.dtype.element_ty),
        within & (dv_column[None, :] < HEAD_DIM_V),
    )


@triton.jit(do_not_specialize=SIZES)
def attention_backward_q(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_db,
    stride_dh,
    stride_dm,
    batch,
    heads_q,
    heads_kv,
    seq_q,
    seq_kv,
    scale,
    causal_shift,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dq [batch, heads_q, seq_q, HEAD_DIM], contiguous."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    BLOCK_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    head_index = tl.program_id(0) % (batch * heads_q)
    block = tl.cdiv(seq_q, BLOCK_M) - 1 - tl.program_id(0) // (batch * heads_q)
    b = (head_index // heads_q).to(tl.int64)
    h = (head_index % heads_q).to(tl.int64)
    kv_head = h // (heads_q // heads_kv)
    queries = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d_column = tl.arange(0, BLOCK_D)
    dv_column = tl.arange(0, BLOCK_DV)
    statistics = head_index.to(tl.int64) * seq_q
    q = load_tile(q_ptr + b * stride_qb + h * stride_qh, queries, stride_qm, d_column, seq_q, HEAD_DIM)
    dout = load_tile(dout_ptr + b * stride_db + h * stride_dh, queries, stride_dm, dv_column, seq_q, HEAD_DIM_V)
    lse = load_lse(lse_ptr + statistics, queries, seq_q)
    delta = tl.load(delta_ptr + statistics + queries, queries < seq_q, other=0.0)
    k_base = k_ptr + b * stride_kb + kv_head * stride_kh
    v_base = v_ptr + b * stride_vb + kv_head * stride_vh
    scale_log2 = scale * 1.4426950408889634

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = tl.maximum(tl.minimum(seq_kv, (block + 1) * BLOCK_M + causal_shift), 0) if CAUSAL else seq_kv
    for start in range(0, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_base, keys, stride_kn, d_column, seq_kv, HEAD_DIM)  # [N, D]
        v = load_tile(v_base, keys, stride_vn, dv_column, seq_kv, HEAD_DIM_V)  # [N, DV]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2  # [M, N]
        visible = keys[None, :] < seq_kv
        if CAUSAL:
            visible &= keys[None, :] <= queries[:, None] + causal_shift
        p = tl.exp2(tl.where(visible, scores, float("-inf")) - lse[:, None])
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    tl.store(
        dq_ptr + (statistics + queries)[:, None] * HEAD_DIM + d_column[None, :],
        (dq * scale).to(dq_ptr.dtype.element_ty),
        (queries[:, None] < seq_q) & (d_column[None, :] < HEAD_DIM),
    )
