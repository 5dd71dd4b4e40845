"""Flash attention as a PyTorch operator."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fusedops import runtime

from . import ENTRY

MAX_HEAD_DIM = 256


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_alignment: str = "top_left",
) -> torch.Tensor:
    """softmax(softmax_scale · query · keyᵀ) · value without the score matrix in memory (Dao 2023, FlashAttention-2).

    Args:
        query: [batch, heads_q, seq_q, head_dim], float32, bfloat16 or float16. float32 products follow
            ``torch.get_float32_matmul_precision()``.
        key: [batch, heads_kv, seq_kv, head_dim]; heads_q is a multiple of heads_kv, and query head h uses the kv head
            h // (heads_q / heads_kv).
        value: [batch, heads_kv, seq_kv, head_dim_v].
        softmax_scale: multiplies the scores; 1 / sqrt(head_dim) without it.
        causal: query i sees the keys j ≤ i (``"top_left"``) or j ≤ i + seq_kv − seq_q (``"bottom_right"``). A query
            that sees no key gets 0.
        causal_alignment: ``"top_left"``, as PyTorch's SDPA, or ``"bottom_right"``, as the flash-attn package.

    Returns:
        [batch, heads_q, seq_q, head_dim_v], contiguous, in the dtype of the inputs.

    Raises:
        TypeError: the dtypes are not one floating-point dtype.
        ValueError: shapes or devices do not fit each other, or ``causal_alignment`` is unknown.
    """
    _check(query, key, value, causal_alignment)
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    shift = key.shape[2] - query.shape[2] if causal_alignment == "bottom_right" else 0
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return _forward_op(query, key, value, scale, causal, shift, differentiated)[0]


def flash_attention_eager(query, key, value, softmax_scale=None, causal=False, causal_alignment="top_left"):
    """PyTorch's own function; the bottom-right alignment needs a mask there."""
    mask = None
    if causal and causal_alignment == "bottom_right":
        shape = query.shape[2], key.shape[2]
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(key.shape[2] - query.shape[2])
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal and mask is None, scale=softmax_scale, enable_gqa=True
    )


def _check(query, key, value, causal_alignment):
    if causal_alignment not in ("top_left", "bottom_right"):
        raise ValueError(f"causal_alignment must be 'top_left' or 'bottom_right', got {causal_alignment!r}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions [batch, heads, seq, head_dim], got {list(tensor.shape)}")
        if not tensor.is_floating_point() or tensor.dtype != query.dtype:
            raise TypeError(
                f"query, key and value must have one floating-point dtype, got {name} {tensor.dtype} beside query "
                f"{query.dtype}"
            )
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, query on {query.device}; put all on one device")
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(f"{name} must have query's batch size {query.shape[0]}, got {tensor.shape[0]}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key must have query's head_dim {query.shape[-1]}, got {key.shape[-1]}")
    if key.shape[1:3] != value.shape[1:3]:
        raise ValueError(
            f"key and value must have the same heads and length, got {list(key.shape[1:3])} and "
            f"{list(value.shape[1:3])}"
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query's number of heads must be a multiple of key's, got {query.shape[1]} query heads and "
            f"{key.shape[1]} kv heads"
        )


def _unsupported(query, value):
    name = str(query.dtype).removeprefix("torch.")
    if name not in ENTRY.dtypes:
        return f"query has dtype {name}, the kernel takes {', '.join(ENTRY.dtypes)}"
    if max(query.shape[-1], value.shape[-1]) > MAX_HEAD_DIM or min(query.shape[-1], value.shape[-1]) == 0:
        return f"head_dim is {query.shape[-1]}, head_dim_v {value.shape[-1]}; the kernel takes 1 to {MAX_HEAD_DIM}"
    return None


def _launch_values(query: torch.Tensor, value: torch.Tensor, kernel: str) -> dict:
    """The compile-time values of a launch: the config for the head dims, and the precision of float32 products."""
    head_dims = {"HEAD_DIM": query.shape[-1], "HEAD_DIM_V": value.shape[-1]}
    bucket = {name: max(16, 1 << (size - 1).bit_length()) for name, size in head_dims.items()}
    dtype = str(query.dtype).removeprefix("torch.")
    config = ENTRY.configs.lookup(kernel, runtime.facts(query.device), dtype, **bucket)
    full = query.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return head_dims | config | {"PRECISION": "ieee" if full else "tf32"}


def _unit_last_stride(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous() for tensor in tensors]


def _forward(query, key, value, scale, causal, shift, with_lse):
    batch, heads_q, seq_q, _ = query.shape
    _, heads_kv, seq_kv, head_dim_v = value.shape
    if not runtime.use_kernel("flash_attention", query.device, _unsupported(query, value)):
        return _forward_pytorch(query, key, value, scale, causal, shift, with_lse)

    from . import forward

    query, key, value = _unit_last_stride(query, key, value)
    out = query.new_empty(batch, heads_q, seq_q, head_dim_v)
    lse = query.new_empty((batch, heads_q, seq_q) if with_lse else 0, dtype=torch.float32)
    values = _launch_values(query, value, "attention_forward")
    runtime.launch(
        forward.attention_forward,
        (-(-seq_q // values["BLOCK_M"]) * batch * heads_q,),
        query.device,
        query,
        key,
        value,
        out,
        lse,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        batch,
        heads_q,
        heads_kv,
        seq_q,
        seq_kv,
        scale * math.log2(math.e),
        shift,
        CAUSAL=causal,
        WITH_LSE=with_lse,
        **values,
    )
    return out, lse


def _scores(query, key, scale, causal, shift):
    """[batch, heads_kv, group, seq_q, seq_kv] in float32 or wider, masked."""
    compute = torch.promote_types(query.dtype, torch.float32)
    query = query.to(compute).unflatten(1, (key.shape[1], -1))
    scores = scale * query @ key.to(compute).unsqueeze(2).mT
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril(shift)
        scores = scores.masked_fill(~visible, float("-inf"))
    return scores


def _forward_pytorch(query, key, value, scale, causal, shift, with_lse):
    batch, heads_q, seq_q, _ = query.shape
    out = query.new_zeros(batch, heads_q, seq_q, value.shape[-1])
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    blind = min(max(-shift, 0), seq_q) if causal else 0  # queries before the first that sees a key
    if key.shape[2] and blind < seq_q:
        mask = None
        if causal and shift > 0:
            mask = torch.ones(seq_q, key.shape[2], dtype=torch.bool, device=query.device).tril(shift)
        attended = F.scaled_dot_product_attention(
            query[:, :, blind:],
            key,
            value,
            mask,
            is_causal=causal and mask is None,
            scale=scale,
            enable_gqa=heads_q != key.shape[1],
        )
        out[:, :, blind:] = attended
    if not with_lse:
        return out, query.new_empty(0, dtype=lse_dtype)
    lse = torch.logsumexp(_scores(query, key, scale, causal, shift), -1).flatten(1, 2)
    return out, lse.to(lse_dtype).contiguous()


def _backward(grad_output, query, key, value, out, lse, scale, causal, shift):
    batch, heads_q, seq_q, _ = query.shape
    _, heads_kv, seq_kv, _ = value.shape
    if not runtime.use_kernel("flash_attention_backward", query.device, _unsupported(query, value)):
        return _backward_pytorch(grad_output, query, key, value, out, lse, scale, causal, shift)

    from . import backward

    query, key, value, grad_output = _unit_last_stride(query, key, value, grad_output)
    dq, dk, dv = (query.new_empty(tensor.shape) for tensor in (query, key, value))
    delta = torch.empty_like(lse)
    values = _launch_values(query, value, "attention_delta")
    del values["HEAD_DIM"], values["PRECISION"]
    runtime.launch(
        backward.attention_delta,
        (-(-seq_q // values["BLOCK_M"]) * batch * heads_q,),
        query.device,
        out,
        grad_output,
        delta,
        *grad_output.stride()[:3],
        heads_q,
        seq_q,
        **values,
    )
    strides = [*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad_output.stride()[:3]]
    sizes = [batch, heads_q, heads_kv, seq_q, seq_kv, scale, shift]
    values = _launch_values(query, value, "attention_backward_kv")
    runtime.launch(
        backward.attention_backward_kv,
        (-(-seq_kv // values["BLOCK_N"]) * batch * heads_kv,),
        query.device,
        *(query, key, value, grad_output, lse, delta, dk, dv, *strides, *sizes),
        CAUSAL=causal,
        **values,
    )
    values = _launch_values(query, value, "attention_backward_q")
    runtime.launch(
        backward.attention_backward_q,
        (-(-seq_q // values["BLOCK_M"]) * batch * heads_q,),
        query.device,
        *(query, key, value, grad_output, lse, delta, dq, *strides, *sizes),
        CAUSAL=causal,
        **values,
    )
    return dq, dk, dv


def _backward_pytorch(grad_output, query, key, value, out, lse, scale, causal, shift):
    heads_kv = key.shape[1]
    scores = _scores(query, key, scale, causal, shift)
    lse = lse.unflatten(1, (heads_kv, -1)).unsqueeze(-1)
    p = torch.exp(scores - lse.masked_fill(lse == float("-inf"), float("inf")))
    q, dout, o = (t.to(p.dtype).unflatten(1, (heads_kv, -1)) for t in (query, grad_output, out))
    k, v = key.to(p.dtype).unsqueeze(2), value.to(p.dtype).unsqueeze(2)
    ds = p * (dout @ v.mT - (dout * o).sum(-1, keepdim=True))
    dq = scale * (ds @ k).flatten(1, 2)
    dk = scale * (ds.mT @ q).sum(2)
    dv = (p.mT @ dout).sum(2)
    return tuple(t.to(query.dtype).contiguous() for t in (dq, dk, dv))


def _forward_fake(query, key, value, scale, causal, shift, with_lse):
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[:3] if with_lse else 0, dtype=lse_dtype)
    return query.new_empty(*query.shape[:3], value.shape[-1]), lse


def _backward_fake(grad_output, query, key, value, out, lse, scale, causal, shift):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale, ctx.causal, ctx.shift, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _autograd(ctx, grad_output, _):
    return *_backward_op(grad_output, *ctx.saved_tensors, ctx.scale, ctx.causal, ctx.shift), None, None, None, None


_forward_op = runtime.register(
    "flash_attention(Tensor query, Tensor key, Tensor value, float scale, bool causal, SymInt shift,"
    " bool with_lse) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
)
_backward_op = runtime.register(
    "flash_attention_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse,"
    " float scale, bool causal, SymInt shift) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
