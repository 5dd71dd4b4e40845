"""FlashAttention-2 forward (Dao 2023, algorithm 1), portable Triton.

A program owns BLOCK_M queries of one head and walks the keys in blocks of BLOCK_N, keeping for each query the largest
score m so far, the sum l of exp(score − m) and the unnormalised output. Scores are in base 2: exp2 is one instruction.
"""

import triton
import triton.language as tl

# No recompiling for a new batch size or length.
SIZES = ["batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "causal_shift"]


@triton.jit(do_not_specialize=SIZES)
def attention_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    batch,
    heads_q,
    heads_kv,
    seq_q,
    seq_kv,
    scale_log2,
    causal_shift,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    CAUSAL: tl.constexpr,
    WITH_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """q [batch, heads_q, seq_q, HEAD_DIM], k and v [batch, heads_kv, seq_kv, ·] with unit last strides
    → out [batch, heads_q, seq_q, HEAD_DIM_V] contiguous, lse [batch, heads_q, seq_q] float32.

    Query i sees the keys j ≤ i + causal_shift. Causal blocks with the most keys come first, so that the short ones fill
    the tail of the grid.
    """
    BLOCK_D: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM, 16))
    BLOCK_DV: tl.constexpr = triton.next_power_of_2(max(HEAD_DIM_V, 16))
    head_index = tl.program_id(0) % (batch * heads_q)
    block = tl.cdiv(seq_q, BLOCK_M) - 1 - tl.program_id(0) // (batch * heads_q)
    b = (head_index // heads_q).to(tl.int64)
    h = head_index % heads_q
    kv_head = h // (heads_q // heads_kv)

    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_base = q_ptr + b * stride_qb + h.to(tl.int64) * stride_qh
    k_base = k_ptr + b * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_base = v_ptr + b * stride_vb + kv_head.to(tl.int64) * stride_vh
    q = tl.load(
        q_base + rows[:, None].to(tl.int64) * stride_qm + d[None, :],
        (rows[:, None] < seq_q) & (d[None, :] < HEAD_DIM),
        other=0.0,
    )  # [M, D]

    # Keys before `full` are seen by every query of the block; those from `full` to `end` need a mask.
    if CAUSAL:
        end = tl.maximum(tl.minimum(seq_kv, (block + 1) * BLOCK_M + causal_shift), 0)
        full = tl.maximum(tl.minimum(seq_kv, block * BLOCK_M + causal_shift + 1), 0) // BLOCK_N * BLOCK_N
    else:
        end = seq_kv
        full = seq_kv // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    for start in range(0, full, BLOCK_N):
        acc, m, l = attend(  # noqa: E741
            acc, m, l, q, k_base, v_base, stride_kn, stride_vn, start, rows, d, dv, seq_kv, scale_log2, causal_shift,
            HEAD_DIM, HEAD_DIM_V, False, False, PRECISION, BLOCK_N,
        )  # fmt: skip
    for start in range(full, end, BLOCK_N):
        acc, m, l = attend(  # noqa: E741
            acc, m, l, q, k_base, v_base, stride_kn, stride_vn, start, rows, d, dv, seq_kv, scale_log2, causal_shift,
            HEAD_DIM, HEAD_DIM_V, True, CAUSAL, PRECISION, BLOCK_N,
        )  # fmt: skip

    # A query that sees no key has l = 0: its output is 0 and its lse −inf.
    out = acc / tl.where(l > 0, l, 1.0)[:, None]
    head_rows = head_index.to(tl.int64) * seq_q + rows
    tl.store(
        out_ptr + head_rows[:, None] * HEAD_DIM_V + dv[None, :],
        out.to(out_ptr.dtype.element_ty),
        (rows[:, None] < seq_q) & (dv[None, :] < HEAD_DIM_V),
    )
    if WITH_LSE:
        LN_2: tl.constexpr = 0.6931471805599453
        tl.store(lse_ptr + head_rows, (m + tl.log2(l)) * LN_2, rows < seq_q)


@triton.jit
def attend(
    acc,
    m,
    l,  # noqa: E741
    q,
    k_base,
    v_base,
    stride_kn,
    stride_vn,
    start,
    rows,
    d,
    dv,
    seq_kv,
    scale_log2,
    causal_shift,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The keys start … start + BLOCK_N, taken into the running output, maximum and sum of the block's queries."""
    keys = start + tl.arange(0, BLOCK_N)
    within = keys < seq_kv if MASKED else keys >= 0
    k = tl.load(
        k_base + keys[None, :].to(tl.int64) * stride_kn + d[:, None],
        within[None, :] & (d[:, None] < HEAD_DIM),
        other=0.0,
    )  # [D, N]
    v = tl.load(
        v_base + keys[:, None].to(tl.int64) * stride_vn + dv[None, :],
        within[:, None] & (dv[None, :] < HEAD_DIM_V),
        other=0.0,
    )  # [N, DV]
    scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2  # [M, N]
    if MASKED:
        visible = within[None, :]
        if CAUSAL:
            visible &= keys[None, :] <= rows[:, None] + causal_shift
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    # While a query has seen no key, its m is −inf: subtract 0, since −inf − (−inf) is NaN.
    reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(scores - reference[:, None])
    alpha = tl.exp2(m - reference)
    l = l * alpha + tl.sum(p, 1)  # noqa: E741
    acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
    return acc, m_new, l
