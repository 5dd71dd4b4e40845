"""Flash attention as a PyTorch operator."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusedops import runtime

from . import ENTRY

ALIGNMENTS = ("top_left", "bottom_right")
_matmul = torch.backends.cuda.matmul


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_alignment: str = "top_left",
) -> torch.Tensor:
    """Attention, softmax(softmax_scale · query · keyᵀ) · value, in tiles (FlashAttention-2, Dao 2023).

    Three queries and five keys under ``causal``, where 1 is seen::

        top_left, as F.scaled_dot_product_attention    bottom_right, as flash-attn
        1 0 0 0 0                                      1 1 1 0 0
        1 1 0 0 0                                      1 1 1 1 0
        1 1 1 0 0                                      1 1 1 1 1

    Under autocast the inputs are cast to its dtype. Products of float32 inputs follow
    ``torch.get_float32_matmul_precision()``: in full at "highest", in TF32 otherwise where the GPU has it.

    Args:
        query: [batch, heads_q, seq_q, head_dim], float32, bfloat16 or float16 (float64 runs PyTorch's version).
        key: [batch, heads_kv, seq_kv, head_dim]; query head h uses key head h // (heads_q / heads_kv).
        value: [batch, heads_kv, seq_kv, head_dim_v].
        softmax_scale: multiplies the scores; None for 1 / sqrt(head_dim).
        causal: query i sees only the keys up to i (``top_left``) or up to i + seq_kv − seq_q (``bottom_right``).
        causal_alignment: ``"top_left"`` or ``"bottom_right"``.

    Returns:
        [batch, heads_q, seq_q, head_dim_v], contiguous; 0 for a query that sees no key.

    Raises:
        TypeError: the dtypes are not floating point, or not the same.
        ValueError: shapes or devices do not fit together, or the alignment is unknown.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value))
    _check(query, key, value, causal_alignment)
    if softmax_scale is None:
        softmax_scale = query.shape[-1] ** -0.5
    return _forward_op(query, key, value, softmax_scale, causal, causal_alignment)[0]


def flash_attention_eager(query, key, value, softmax_scale=None, causal=False, causal_alignment="top_left"):
    """What a model does without fusedops: PyTorch's function, with a mask where it has no name for the alignment."""
    mask = None
    if causal and causal_alignment == "bottom_right":
        seq_q, seq_kv = query.shape[2], key.shape[2]
        mask = torch.ones(seq_q, seq_kv, dtype=torch.bool, device=query.device).tril(seq_kv - seq_q)
    # PyTorch's memory-efficient kernel reads 16 bytes from addresses that are no multiple of 16, and takes the whole
    # CUDA context with it (pytorch issue 183484).
    query, key, value = (t if t.data_ptr() % 16 == 0 else t.clone() for t in (query, key, value))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=softmax_scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal_alignment: str) -> None:
    if not query.is_floating_point():
        raise TypeError(f"flash_attention: query must have a floating-point dtype, got {query.dtype}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"flash_attention: {name} must be [batch, heads, seq, head_dim], got {list(tensor.shape)}")
        if tensor.dtype != query.dtype:
            raise TypeError(f"flash_attention: {name} has dtype {tensor.dtype}, query {query.dtype}; cast to one dtype")
        if tensor.device != query.device:
            raise ValueError(
                f"flash_attention: {name} is on {tensor.device}, query on {query.device}; put all on one device"
            )
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(f"flash_attention: {name} has batch {tensor.shape[0]}, query {query.shape[0]}")
    if key.shape[3] != query.shape[3] or key.shape[3] == 0:
        raise ValueError(
            f"flash_attention: query and key must have the same head_dim, at least 1, got {query.shape[3]} and "
            f"{key.shape[3]}"
        )
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(
            f"flash_attention: value must have key's heads and length {list(key.shape[1:3])}, "
            f"got {list(value.shape[1:3])}"
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"flash_attention: query's heads must be a multiple of key's, got {query.shape[1]} and {key.shape[1]}"
        )
    if causal_alignment not in ALIGNMENTS:
        raise ValueError(f"flash_attention: causal_alignment must be one of {ALIGNMENTS}, got {causal_alignment!r}")


def _unsupported(query: torch.Tensor, value: torch.Tensor, softmax_scale: float) -> str | None:
    name = str(query.dtype).removeprefix("torch.")
    if name not in ENTRY.dtypes:
        return f"query has dtype {name}, the kernel takes {', '.join(ENTRY.dtypes)}"
    if max(query.shape[3], value.shape[3]) > 256:
        return f"head dims {query.shape[3]} and {value.shape[3]}, the kernel takes up to 256"
    # The kernel takes the largest score before it scales.
    return None if softmax_scale > 0 else f"softmax_scale is {softmax_scale}, the kernel takes positive ones"


def _diagonal(query: torch.Tensor, key: torch.Tensor, causal: bool, causal_alignment: str) -> int:
    """The last key that query 0 sees; query i sees i keys more."""
    seq_q, seq_kv = query.shape[2], key.shape[2]
    if not causal:
        return seq_kv
    return seq_kv - seq_q if causal_alignment == "bottom_right" else 0


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _launch(name, rows, query, key, value, tensors, softmax_scale, heads, diagonal, grad_output=None):
    """Launch the kernel ``name`` on blocks of the sequence length of ``rows`` = (config key, batch · heads, length)."""
    from . import kernel

    head_dim, head_dim_v = query.shape[3], value.shape[3]
    facts = runtime.facts(query.device)
    dtype = str(query.dtype).removeprefix("torch.")
    widest = kernel.padded(max(head_dim, head_dim_v))
    config = ENTRY.configs.lookup(name, facts, dtype, head_dim=widest)
    block, programs, length = rows
    strided = (query, key, value) if grad_output is None else (query, key, value, grad_output)
    runtime.launch(
        getattr(kernel, name),
        (-(-length // config[block]) * programs,),
        query.device,
        query,
        key,
        value,
        *tensors,
        softmax_scale,
        heads,
        query.shape[1] // key.shape[1],
        query.shape[2],
        key.shape[2],
        diagonal,
        *(stride for tensor in strided for stride in tensor.stride()[:3]),
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        INPUT_PRECISION=_input_precision(query.dtype, facts.arch),
        **config,
    )


def _input_precision(dtype: torch.dtype, arch: str) -> str:
    """For tl.dot; it means nothing to the narrow dtypes, which so share one binary. Only these GPUs have TF32."""
    has_tf32 = arch.startswith("sm_") or arch == "gfx942"
    # torch.get_float32_matmul_precision() raises for those who set this attribute; this follows either way of setting.
    return "tf32" if dtype == torch.float32 and has_tf32 and _matmul.fp32_precision == "tf32" else "ieee"


def _forward(query, key, value, softmax_scale, causal, causal_alignment):
    diagonal = _diagonal(query, key, causal, causal_alignment)
    if not runtime.use_kernel("flash_attention", query.device, _unsupported(query, value, softmax_scale)):
        return _forward_pytorch(query, key, value, softmax_scale, diagonal)
    out, lse = _forward_fake(query, key, value, softmax_scale, causal, causal_alignment)
    batch, heads, seq_q, _ = query.shape
    q, k, v = (_unit_stride(tensor) for tensor in (query, key, value))
    rows = ("BLOCK_M", batch * heads, seq_q)
    _launch("flash_attention_forward", rows, q, k, v, (out, lse), softmax_scale, heads, diagonal)
    return out, lse


def _forward_pytorch(query, key, value, softmax_scale, diagonal):
    sees_all = diagonal >= key.shape[2] - 1
    if (
        query.device.type == "cpu"
        and (sees_all or diagonal == 0)
        and query.shape[3] == value.shape[3]
        and query.numel()
        and key.numel()
        and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    ):
        # What F.scaled_dot_product_attention runs here; this one also returns lse.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, not sees_all, scale=softmax_scale
        )
        return out.contiguous(), lse.contiguous()
    scores = _scores(query, key, softmax_scale, diagonal)
    lse = scores.logsumexp(-1, keepdim=True)
    out = _probabilities(scores, lse) @ value.to(scores.dtype)
    return out.to(query.dtype).reshape(*query.shape[:3], value.shape[3]), lse.reshape(query.shape[:3])


def _scores(query: torch.Tensor, key: torch.Tensor, softmax_scale: float, diagonal: int) -> torch.Tensor:
    """[batch, heads_kv, group · seq_q, seq_kv], in float32 or float64."""
    seq_q, seq_kv = query.shape[2], key.shape[2]
    rows, keys = _by_kv_head(query, key), key.to(_compute_dtype(key))
    scores = (rows * softmax_scale) @ keys.transpose(-1, -2)
    if diagonal >= seq_kv - 1:
        return scores
    hidden = torch.ones(seq_q, seq_kv, dtype=torch.bool, device=key.device).triu(diagonal + 1)
    return scores.masked_fill(hidden.repeat(query.shape[1] // key.shape[1], 1), float("-inf"))


def _by_kv_head(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[batch, heads_q, seq_q, width] as [batch, heads_kv, group · seq_q, width], in float32 or float64."""
    batch, heads_q, seq_q, width = tensor.shape
    heads_kv = key.shape[1]
    return tensor.to(_compute_dtype(key)).reshape(batch, heads_kv, heads_q // heads_kv * seq_q, width)


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores − lse), 0 where a query sees no key."""
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0)).exp()


def _compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _backward(grad_output, query, key, value, out, lse, softmax_scale, causal, causal_alignment, needs_kv_grad):
    diagonal = _diagonal(query, key, causal, causal_alignment)
    if not runtime.use_kernel("flash_attention_backward", query.device, _unsupported(query, value, softmax_scale)):
        return _backward_pytorch(grad_output, query, key, value, out, lse, softmax_scale, diagonal, needs_kv_grad)
    batch, heads, seq_q, _ = query.shape
    heads_kv, seq_kv = key.shape[1:3]
    q, k, v, do = (_unit_stride(tensor) for tensor in (query, key, value, grad_output))
    dq, delta = query.new_empty(query.shape), torch.empty_like(lse)
    rows = ("BLOCK_M", batch * heads, seq_q)
    tensors = (out, lse, do, dq, delta)
    _launch("flash_attention_backward_dq", rows, q, k, v, tensors, softmax_scale, heads, diagonal, do)
    if not needs_kv_grad:
        return dq, key.new_empty(0), value.new_empty(0)
    dk, dv = key.new_empty(key.shape), value.new_empty(value.shape)
    rows = ("BLOCK_N", batch * heads_kv, seq_kv)
    tensors = (lse, do, delta, dk, dv)
    _launch("flash_attention_backward_dkdv", rows, q, k, v, tensors, softmax_scale, heads_kv, diagonal, do)
    return dq, dk, dv


def _backward_pytorch(grad_output, query, key, value, out, lse, softmax_scale, diagonal, needs_kv_grad):
    q, do, o = (_by_kv_head(tensor, key) for tensor in (query, grad_output, out))
    k, v = key.to(q.dtype), value.to(q.dtype)
    p = _probabilities(_scores(query, key, softmax_scale, diagonal), lse.reshape(*q.shape[:3], 1))
    ds = p * (do @ v.transpose(-1, -2) - (do * o).sum(-1, keepdim=True)) * softmax_scale
    dq = (ds @ k).to(query.dtype).reshape(query.shape)
    if not needs_kv_grad:
        return dq, key.new_empty(0), value.new_empty(0)
    return dq, (ds.transpose(-1, -2) @ q).to(key.dtype), (p.transpose(-1, -2) @ do).to(value.dtype)


def _forward_fake(query, key, value, softmax_scale, causal, causal_alignment):
    out = query.new_empty((*query.shape[:3], value.shape[3]))
    return out, query.new_empty(query.shape[:3], dtype=_compute_dtype(query))


def _backward_fake(grad_output, query, key, value, out, lse, softmax_scale, causal, causal_alignment, needs_kv_grad):
    if not needs_kv_grad:
        return query.new_empty(query.shape), key.new_empty(0), value.new_empty(0)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx, inputs, output):
    query, key, value, ctx.softmax_scale, ctx.causal, ctx.causal_alignment = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(output[1])


def _autograd(ctx, grad_output, _):
    needs_kv_grad = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    dq, dk, dv = _backward_op(
        grad_output, *ctx.saved_tensors, ctx.softmax_scale, ctx.causal, ctx.causal_alignment, needs_kv_grad
    )
    return (dq, dk, dv, None, None, None) if needs_kv_grad else (dq, None, None, None, None, None)


_forward_op = runtime.register(
    "flash_attention(Tensor query, Tensor key, Tensor value, float softmax_scale, bool causal, str causal_alignment)"
    " -> (Tensor out, Tensor lse)",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
)
_backward_op = runtime.register(
    "flash_attention_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse,"
    " float softmax_scale, bool causal, str causal_alignment, bool needs_kv_grad) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
