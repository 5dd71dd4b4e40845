"""One function per operation, with the signatures and the meaning of ``torch.nn.functional``.

What a kernel does not cover runs PyTorch's own function; on a GPU a once-per-cause warning says so, and inside
:func:`fusedops.strict` it is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from . import runtime
from .catalog.cross_entropy import op as _cross_entropy
from .catalog.flash_attention.op import flash_attention
from .catalog.fp8_gemm.op import fp8_gemm
from .catalog.int4_gemm.op import int4_gemm
from .catalog.layer_norm import op as _layer_norm
from .catalog.rms_norm import op as _rms_norm
from .catalog.softmax import op as _softmax

__all__ = [
    "cross_entropy",
    "fp8_linear",
    "fused_linear_cross_entropy",
    "int4_linear",
    "layer_norm",
    "log_softmax",
    "rms_norm",
    "scaled_dot_product_attention",
    "softmax",
]

_FLOAT32_EPS = torch.finfo(torch.float32).eps
_FLOAT64_EPS = torch.finfo(torch.float64).eps


def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.rms_norm``: x / sqrt(mean(x²) + eps) · w over the last dimensions (Zhang & Sennrich 2019).

    Args:
        input: [*, normalized_shape], floating point. Under CUDA's autocast it is computed and returned in float32.
        normalized_shape: the sizes of the dimensions to normalise over, together.
        weight: [normalized_shape]; None for no scaling.
        eps: added to the mean square; None for the machine epsilon of float32 (float64 for float64 inputs).

    Returns:
        [*, normalized_shape], in the input's dtype.

    Raises:
        ValueError: ``normalized_shape`` are not the input's last dimensions, or ``weight`` has another shape.
        TypeError: ``input`` or ``weight`` is not floating point.
    """
    if input.is_nested:
        return F.rms_norm(input, normalized_shape, weight, eps)
    if eps is None:
        eps = _FLOAT64_EPS if input.dtype == torch.float64 else _FLOAT32_EPS
    if _AUTOCAST_RMS_NORM:
        input, weight = _autocast_to_float32(input, weight)
    if len(normalized_shape) == 1 and input.shape[-1:] == tuple(normalized_shape):
        return _rms_norm.rms_norm(input, weight, eps)
    rows, weight = _flatten_normalized("rms_norm", input, normalized_shape, weight=weight).values()
    return _rms_norm.rms_norm(rows, weight, eps).view(input.shape)


def layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``torch.nn.functional.layer_norm``: (x − mean) / sqrt(variance + eps) · w + b over the last dimensions (Ba et al.
    2016).

    Args:
        input: [*, normalized_shape], floating point. Under CUDA's autocast it is computed and returned in float32.
        normalized_shape: the sizes of the dimensions to normalise over, together.
        weight: [normalized_shape]; None for no scaling.
        bias: [normalized_shape]; None for no shift.
        eps: added to the variance.

    Returns:
        [*, normalized_shape], in the input's dtype.

    Raises:
        ValueError: ``normalized_shape`` are not the input's last dimensions, or ``weight`` or ``bias`` differs from it.
        TypeError: ``input``, ``weight`` or ``bias`` is not floating point.
    """
    if input.is_nested:
        return F.layer_norm(input, normalized_shape, weight, bias, eps)
    input, weight, bias = _autocast_to_float32(input, weight, bias)
    if len(normalized_shape) == 1 and input.shape[-1:] == tuple(normalized_shape):
        return _layer_norm.layer_norm(input, weight, bias, eps)
    rows, weight, bias = _flatten_normalized("layer_norm", input, normalized_shape, weight=weight, bias=bias).values()
    return _layer_norm.layer_norm(rows, weight, bias, eps).view(input.shape)


def softmax(
    input: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``torch.nn.functional.softmax``: exp(x_i) / Σ_j exp(x_j) along a dimension.

    Args:
        input: any shape. Under CUDA's autocast and without ``dtype`` it is computed and returned in float32.
        dim: the dimension that sums to 1; None is PyTorch's deprecated implicit choice, with its warning.
        dtype: the input is cast to it first, and it is the result's.

    Raises:
        IndexError: ``dim`` is out of range.
        TypeError: the input is not floating point and no ``dtype`` is given.
    """
    if input.is_nested:
        return F.softmax(input, dim, _stacklevel, dtype)
    if dim is None:
        dim = F._get_softmax_dim("softmax", input.dim(), _stacklevel)  # type: ignore[attr-defined]
    return _softmax.softmax(_softmax_input(input, dtype), dim)


def log_softmax(
    input: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``torch.nn.functional.log_softmax``: x_i − log Σ_j exp(x_j) along a dimension.

    Args:
        input: any shape. Under CUDA's autocast and without ``dtype`` it is computed and returned in float32.
        dim: the dimension; None is PyTorch's deprecated implicit choice, with its warning.
        dtype: the input is cast to it first, and it is the result's.

    Raises:
        IndexError: ``dim`` is out of range.
        TypeError: the input is not floating point and no ``dtype`` is given.
    """
    if input.is_nested:
        return F.log_softmax(input, dim, _stacklevel, dtype)
    if dim is None:
        dim = F._get_softmax_dim("log_softmax", input.dim(), _stacklevel)  # type: ignore[attr-defined]
    return _softmax.log_softmax(_softmax_input(input, dtype), dim)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``: softmax(query·keyᵀ·scale)·value (Vaswani et al. 2017).

    The kernel covers calls without a mask (causal or not) and without dropout; the others run PyTorch's function.

    Args:
        query: [..., heads, seq_q, head_dim]. Under autocast all three are cast to its dtype.
        key: [..., heads, seq_kv, head_dim].
        value: [..., heads, seq_kv, head_dim_v].
        attn_mask: broadcastable to [..., heads, seq_q, seq_kv]; True or 0 where a query may see a key.
        dropout_p: the probability to drop an attention weight.
        is_causal: query i sees the keys j ≤ i (aligned top-left, also where the lengths differ).
        scale: multiplies the scores; None for 1/sqrt(head_dim).
        enable_gqa: key and value may have fewer heads, a divisor of the query's.

    Returns:
        [..., heads, seq_q, head_dim_v], in the query's dtype.

    Raises:
        RuntimeError: whatever PyTorch refuses, such as head numbers that differ without ``enable_gqa``.
    """
    query, key, value = _autocast_to_lower(query, key, value)
    unsupported = _attention_unsupported(query, key, value, attn_mask, dropout_p, enable_gqa)
    if unsupported is None:
        if query.dim() == 4:
            return flash_attention(query, key, value, scale, is_causal)
        q, k, v = (
            tensor.reshape(1, math.prod(tensor.shape[:-2]), *tensor.shape[-2:]) for tensor in (query, key, value)
        )
        return flash_attention(q, k, v, scale, is_causal).view(*query.shape[:-1], value.shape[-1])
    runtime.use_kernel("scaled_dot_product_attention", query.device, unsupported)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """``torch.nn.functional.cross_entropy``: log Σ exp(x) − x[target], in one pass over the logits.

    The kernel covers class targets without class weights; the other calls run PyTorch's function.

    Args:
        input: [classes], [batch, classes] or [batch, classes, *]. Under autocast it is computed in float32.
        target: [], [batch] or [batch, *], int64; or probabilities, in the input's shape.
        weight: [classes], a weight a class.
        size_average: deprecated by PyTorch in favour of ``reduction``.
        ignore_index: tokens with this target have no loss and no gradient, and do not count in the mean.
        reduce: deprecated by PyTorch in favour of ``reduction``.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        label_smoothing: from 0 to 1: how much of each target is spread over all classes.

    Returns:
        A scalar, or the target's shape for ``"none"``, in the input's dtype.

    Raises:
        RuntimeError, ValueError: whatever PyTorch refuses, such as shapes that do not fit.
        IndexError: on a CPU: a target is no class. On a GPU that token's loss and gradient are NaN.
    """
    if size_average is not None or reduce is not None:
        reduction = F._Reduction.legacy_get_string(size_average, reduce)  # type: ignore[attr-defined]
    unsupported = _cross_entropy_unsupported(input, target, weight, reduction, label_smoothing)
    if unsupported is None:
        if torch.is_autocast_enabled(input.device.type) and input.dtype in (torch.float16, torch.bfloat16):
            input = input.float()
        if input.dim() > 2:
            input = input.movedim(1, -1)
        return _cross_entropy.cross_entropy(input, target, ignore_index, label_smoothing, 0.0, reduction)
    runtime.use_kernel("cross_entropy", input.device, unsupported)
    return F.cross_entropy(
        input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


def fused_linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """``cross_entropy(linear(input, weight, bias), target)`` whose logits never exist as a whole.

    Args:
        input: [..., hidden]. Under autocast it, weight and bias are cast to its dtype, which is the result's too.
        weight: [classes, hidden].
        target: [...] int64 or int32.
        bias: [classes].
        ignore_index: tokens with this target have no loss and no gradient, and do not count in the mean.
        label_smoothing: from 0 to 1: how much of each target is spread over all classes.
        z_loss: the weight of the squared logarithm of the softmax's denominator (PaLM, section 5).
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` (which computes the logits again in the backward pass).
        chunk_tokens: how many tokens' logits exist at a time; None for about as many bytes as ``input`` has.

    Returns:
        A scalar, or [...] for ``"none"``, in the input's dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices do not fit, or an option is out of its range.
        IndexError: on a CPU: a target is no class. On a GPU that token's loss is NaN.
    """
    tensors = (input, weight) if bias is None else (input, weight, bias)
    input, weight, *rest = _autocast_to_lower(*tensors)
    return _cross_entropy.fused_linear_cross_entropy(
        *(input, weight, target, rest[0] if rest else None),
        *(ignore_index, label_smoothing, z_loss, reduction, chunk_tokens),
    )


def int4_linear(
    input: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.linear`` with 4-bit weights: w[n, k] = scales[n, k // g]·q[n, k] + offsets[n, k // g].

    Args:
        input: [..., K]. Under autocast it is cast to its dtype.
        qweight: [N, K / 8] int32, as ``fusedops.catalog.int4_gemm.layout`` packs it.
        scales: [N, K / g], g the group size: 32, 64, 128 or K.
        offsets: [N, K / g].
        bias: [N].

    Returns:
        [..., N], in the input's dtype.
    """
    (input,) = _autocast_to_lower(input)
    return int4_gemm(input, qweight, scales, offsets, bias)


def fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.linear`` with float8 weights and activations.

    Args:
        input: [..., K]; rounded to float8 with one scale a row, or with ``input_scale``. Under autocast it is cast to
            its dtype first.
        weight: [N, K] float8_e4m3fn.
        weight_scale: float32, [] or [N]: what the float8 numbers are multiplied with.
        input_scale: float32 []: a scale known beforehand.
        bias: [N].

    Returns:
        [..., N], in the input's dtype (bfloat16 for a float8 input).
    """
    (input,) = _autocast_to_lower(input)
    return fp8_gemm(input, weight, weight_scale, input_scale, bias)


# Newer PyTorch versions autocast rms_norm to float32 as they do layer_norm; 2.11 does not.
_AUTOCAST_RMS_NORM = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")


def _autocast_to_float32(*tensors: Any) -> tuple[Any, ...]:
    """What PyTorch's CUDA autocast does for norms and softmax; its CPU autocast leaves them alone."""
    if not (torch.is_autocast_enabled("cuda") and tensors[0].is_cuda):
        return tensors
    return tuple(t.float() if t is not None and t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors)


def _autocast_to_lower(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What autocast does for matrix products and attention."""
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.dtype in (torch.float16, torch.bfloat16, torch.float32) else t for t in tensors)


def _flatten_normalized(
    name: str, input: torch.Tensor, normalized_shape: Sequence[int], **parameters: torch.Tensor | None
) -> dict[str, Any]:
    """Input [*, size] and parameters [size], with the normalised dimensions as one."""
    shape = tuple(normalized_shape)
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"{name}: normalized_shape must be the input's last dimensions, got normalized_shape={list(shape)} "
            f"for an input of shape {list(input.shape)}"
        )
    for argument, parameter in parameters.items():
        if parameter is not None and tuple(parameter.shape) != shape:
            raise ValueError(
                f"{name}: {argument} must have the shape {list(shape)} of normalized_shape, got {list(parameter.shape)}"
            )
    flat = {argument: p if p is None else p.reshape(math.prod(shape)) for argument, p in parameters.items()}
    return {"input": input.reshape(*input.shape[: -len(shape)], math.prod(shape)), **flat}


def _softmax_input(input: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype is not None:
        return input.to(dtype)
    return _autocast_to_float32(input)[0]


def _cross_entropy_unsupported(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: str,
    label_smoothing: float,
) -> str | None:
    """What of the call the kernel does not cover. Calls that PyTorch refuses are among them, for it to refuse."""
    if input.is_nested or target.is_nested:
        return "nested tensors"
    if weight is not None:
        return "class weights"
    if target.is_floating_point():
        return "probabilities as targets"
    if not input.is_floating_point() or target.dtype != torch.int64:
        return f"input of {input.dtype} with targets of {target.dtype}"
    if input.dim() == 0 or target.shape != input.shape[:1][: input.dim() - 1] + input.shape[2:]:
        return f"input of shape {list(input.shape)} with targets of shape {list(target.shape)}"
    if input.shape[min(input.dim() - 1, 1)] == 0:
        return "no classes"
    if reduction not in ("mean", "sum", "none") or not 0.0 <= label_smoothing <= 1.0:
        return f"reduction {reduction!r} with label_smoothing {label_smoothing}"
    return None


def _attention_unsupported(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    enable_gqa: bool,
) -> str | None:
    """What of the call the kernel does not cover. Calls that PyTorch refuses are among them, for it to refuse."""
    if query.is_nested or key.is_nested or value.is_nested:
        return "nested tensors"
    if attn_mask is not None:
        return "attn_mask"
    if dropout_p != 0:
        return "dropout_p > 0"
    if not (query.dim() == key.dim() == value.dim() >= 2):
        return "query, key and value with different numbers of dimensions"
    if not (query.dtype == key.dtype == value.dtype):
        return "query, key and value of different dtypes"
    if not (key.shape[:-1] == value.shape[:-1] and query.shape[-1] == key.shape[-1]):
        return "query, key and value whose sizes differ"
    if query.shape[:-2] != key.shape[:-2]:
        if not (query.dim() == 4 and query.shape[0] == key.shape[0]):
            return "query and key with different leading dimensions"
        if not (enable_gqa and key.shape[1] and query.shape[1] % key.shape[1] == 0):
            return "different numbers of heads without enable_gqa"
    return None
