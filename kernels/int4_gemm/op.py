"""The int4 linear as a PyTorch operator."""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from fusedops import runtime

from . import ENTRY
from .layout import check_group_size, dequantize, unpack


def int4_gemm(
    input: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = input · Wᵀ + bias with 4-bit weights, W[n, k] = scales[n, k // g] · q[n, k] + offsets[n, k // g].

    W is dequantized in float32, rounded to the input's dtype, and the products are summed in float32. The gradient goes
    to ``input`` and ``bias`` alone. Under autocast the input is cast, as by ``F.linear``. On a CPU the weight is
    converted once and kept beside ``qweight``: for bfloat16 in the format of PyTorch's int4 kernel, for float32 and
    float16 as a dense float32 weight, because PyTorch's kernel is 20 times slower than ``F.linear`` there.

    Args:
        input: [..., K], float32, bfloat16 or float16 (others, such as float64, run PyTorch's version). The products of
            float32 follow ``torch.get_float32_matmul_precision()`` on a GPU.
        qweight: int32 [N, K/8], packed as :mod:`.layout` says.
        scales: [N, K/g], float32, bfloat16 or float16; g is 32, 64, 128 or K.
        offsets: [N, K/g], float32, bfloat16 or float16.
        bias: [N], any floating dtype.

    Returns:
        [..., N], in the input's dtype.

    Raises:
        TypeError: an argument has a dtype it can't have.
        ValueError: shapes or devices do not fit each other, or the groups have another size.
    """
    if (weight := _ready_weight(input, qweight, scales, offsets, bias)) is not None:
        return F.linear(input, weight, bias)
    device = input.device
    if torch.is_autocast_enabled(device.type) and input.dtype != torch.float64:
        input = input.to(torch.get_autocast_dtype(device.type))
    _check(input, qweight, scales, offsets, bias)
    return _forward_op(input, qweight, scales, offsets, bias)


def int4_gemm_eager(input, qweight, scales, offsets, bias=None):
    """What a model does without a kernel: dequantize, then ``F.linear``."""
    weight = dequantize(qweight, scales, offsets, input.dtype)
    return F.linear(input, weight, None if bias is None else bias.to(input.dtype))


def _check(input, qweight, scales, offsets, bias):
    if not input.is_floating_point():
        raise TypeError(f"int4_gemm: input must have a floating-point dtype, got {input.dtype}")
    if qweight.dtype != torch.int32:
        raise TypeError(f"int4_gemm: qweight must be int32, got {qweight.dtype}")
    if input.dim() == 0 or qweight.dim() != 2 or input.shape[-1] != qweight.shape[1] * 8:
        raise ValueError(
            "int4_gemm: input must be [..., K] and qweight [N, K/8],"
            f" got input {list(input.shape)} and qweight {list(qweight.shape)}"
        )
    n, k = qweight.shape[0], input.shape[-1]
    for name, tensor in (("scales", scales), ("offsets", offsets)):
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"int4_gemm: {name} must be float32, bfloat16 or float16, got {tensor.dtype}")
        if tensor.shape != scales.shape or tensor.dim() != 2 or tensor.shape[0] != n:
            raise ValueError(
                f"int4_gemm: scales and offsets must both be [N, K/group_size] with N = {n},"
                f" got scales {list(scales.shape)} and offsets {list(offsets.shape)}"
            )
    groups = scales.shape[1]
    if groups == 0 or k % groups:
        raise ValueError(f"int4_gemm: scales must have a number of groups that divides K = {k}, got {groups}")
    check_group_size("int4_gemm", k, k // groups)
    if bias is not None:
        if not bias.is_floating_point():
            raise TypeError(f"int4_gemm: bias must have a floating-point dtype, got {bias.dtype}")
        if bias.dim() != 1 or bias.shape[0] != n:
            raise ValueError(f"int4_gemm: bias must be [N] with N = {n}, got {list(bias.shape)}")
    for name, tensor in (("qweight", qweight), ("scales", scales), ("offsets", offsets), ("bias", bias)):
        if tensor is not None and tensor.device != input.device:
            raise ValueError(
                f"int4_gemm: {name} is on {tensor.device}, input on {input.device}; put them on one device"
            )


def _unsupported(input: torch.Tensor) -> str | None:
    name = str(input.dtype).removeprefix("torch.")
    return None if name in ENTRY.dtypes else f"input has dtype {name}, the kernel takes {', '.join(ENTRY.dtypes)}"


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., K] as [M, K] with unit stride along K; copies only where no view is possible."""
    rows = tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch_options(name: str, rows: torch.Tensor, qweight: torch.Tensor, scales: torch.Tensor) -> dict:
    dtype = str(rows.dtype).removeprefix("torch.")
    config = ENTRY.configs.lookup(name, runtime.facts(rows.device), dtype, m=rows.shape[0])
    exact = rows.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    groups = scales.shape[1]
    group_size = 0 if groups == 1 else qweight.shape[1] * 8 // groups
    return config | {"GROUP_SIZE": group_size, "PRECISION": "ieee" if exact else "tf32"}


def _forward(input, qweight, scales, offsets, bias):
    n, k = qweight.shape[0], input.shape[-1]
    if not runtime.use_kernel("int4_gemm", input.device, _unsupported(input)):
        return _forward_pytorch(input, qweight, scales, offsets, bias)

    from . import kernel

    x = _rows(input)
    m = x.shape[0]
    y = input.new_empty((*input.shape[:-1], n))
    options = _launch_options("int4_gemm_forward", x, qweight, scales)
    splits = options["SPLIT_K"]
    partial = y.new_empty(splits * m * n if splits > 1 else 0, dtype=torch.float32)
    bias = bias if bias is None else bias.contiguous()
    runtime.launch(
        kernel.int4_gemm_forward,
        (-(-m // options["BLOCK_M"]) * -(-n // options["BLOCK_N"]), splits),
        x.device,
        x,
        qweight.contiguous(),
        scales.contiguous(),
        offsets.contiguous(),
        bias,
        y,
        partial,
        m,
        n,
        k,
        scales.shape[1],
        x.stride(0),
        HAS_BIAS=bias is not None,
        **options,
    )
    if splits > 1:
        config = ENTRY.configs.lookup("int4_gemm_reduce", runtime.facts(x.device), str(y.dtype).removeprefix("torch."))
        runtime.launch(
            kernel.int4_gemm_reduce,
            (-(-y.numel() // config["BLOCK"]),),
            x.device,
            partial,
            bias,
            y,
            y.numel(),
            n,
            SPLITS=splits,
            HAS_BIAS=bias is not None,
            **config,
        )
    return y


def _backward(grad_output, qweight, scales, offsets):
    n, k = qweight.shape[0], qweight.shape[1] * 8
    if not runtime.use_kernel("int4_gemm_backward", grad_output.device, _unsupported(grad_output)):
        compute = torch.promote_types(grad_output.dtype, torch.float32)
        weight = _dense_weight(qweight, scales, offsets, compute)
        return (_rows(grad_output).to(compute) @ weight).to(grad_output.dtype).view(*grad_output.shape[:-1], k)

    from . import kernel

    dy = _rows(grad_output)
    m = dy.shape[0]
    dx = dy.new_empty((*grad_output.shape[:-1], k))
    options = _launch_options("int4_gemm_backward", dy, qweight, scales)
    runtime.launch(
        kernel.int4_gemm_backward,
        (-(-m // options["BLOCK_M"]) * -(-k // options["BLOCK_K"]),),
        dy.device,
        dy,
        qweight.contiguous(),
        scales.contiguous(),
        offsets.contiguous(),
        dx,
        m,
        n,
        k,
        scales.shape[1],
        dy.stride(0),
        **options,
    )
    return dx


class _Converted(NamedTuple):
    """A weight in the form that the CPU computes with, and what it was made from."""

    form: str
    sources: tuple[weakref.ref, weakref.ref]
    state: tuple
    weight: Any


_converted = WeakTensorKeyDictionary()


def _state(*tensors: torch.Tensor) -> tuple:
    return tuple((tensor._version, tensor.data_ptr()) for tensor in tensors)


def _find_converted(form: str, qweight: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> Any:
    """What :func:`_convert_once` kept, if all it was made from is what it was; else None."""
    found = _converted.get(qweight)
    if (
        found is None
        or found.form != form
        or found.sources[0]() is not scales
        or found.sources[1]() is not offsets
        or found.state != _state(qweight, scales, offsets)
    ):
        return None
    return found.weight


def _convert_once(form: str, make: Any, qweight: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> Any:
    """``make(qweight, scales, offsets)``, kept as long as ``qweight`` lives and all three stay what they are."""
    if (weight := _find_converted(form, qweight, scales, offsets)) is None:
        weight = make(qweight, scales, offsets)
        # Changes of inference tensors can't be seen.
        if not (qweight.is_inference() or scales.is_inference() or offsets.is_inference()):
            sources = (weakref.ref(scales), weakref.ref(offsets))
            _converted[qweight] = _Converted(form, sources, _state(qweight, scales, offsets), weight)
    return weight


def converted_bytes(qweight: torch.Tensor) -> int:
    """Bytes that a CPU keeps beside ``qweight`` since the first call: the weight in the form that it computes with."""
    found = _converted.get(qweight)
    if found is None:
        return 0
    return sum(part.nbytes for part in (found.weight if isinstance(found.weight, tuple) else (found.weight,)))


def _ready_weight(input, qweight, scales, offsets, bias):
    """The dense weight, where ``F.linear`` with it is all that is left to do: decoding on a CPU waits for the host."""
    if (
        type(input) is not torch.Tensor
        or input.dtype != torch.float32
        or input.device.type != "cpu"
        or torch.compiler.is_compiling()
        or runtime.interpreting()
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack()
        or (torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad)))
        or (bias is not None and bias.dtype != torch.float32)
    ):
        return None
    weight = _find_converted("float32", qweight, scales, offsets)
    fits = weight is not None and input.shape[-1:] == weight.shape[1:]
    return weight if fits and (bias is None or bias.shape == weight.shape[:1]) else None


def _dense_weight(qweight, scales, offsets, dtype):
    if qweight.device.type != "cpu" or dtype != torch.float32:
        return dequantize(qweight, scales, offsets, dtype)
    return _convert_once("float32", dequantize, qweight, scales, offsets)


def _to_pytorch_int4(qweight, scales, offsets):
    """The operands of PyTorch's CPU kernel, whose weight is scale·(q − 8) + zero in bfloat16."""
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack(qweight).to(torch.int32), 2)
    zeros = offsets.float() + 8 * scales.float()
    return packed, torch.stack([scales.float(), zeros], -1).transpose(0, 1).to(torch.bfloat16).contiguous()


def _forward_pytorch(input, qweight, scales, offsets, bias):
    n, k = qweight.shape[0], input.shape[-1]
    group_size = k // scales.shape[1]
    if (
        input.dtype == torch.bfloat16
        and input.device.type == "cpu"
        and n % 16 == 0
        and group_size in (32, 64, 128, 256)
        and input.numel()
        and n
    ):
        packed, scales_and_zeros = _convert_once("int4pack", _to_pytorch_int4, qweight, scales, offsets)
        rows = _rows(input).contiguous()
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, group_size, scales_and_zeros)
        return (y if bias is None else y.add_(bias)).view(*input.shape[:-1], n)
    compute = torch.promote_types(input.dtype, torch.float32)
    weight = _dense_weight(qweight, scales, offsets, compute)
    y = F.linear(input.to(compute), weight, bias if bias is None else bias.to(compute))
    return y.to(input.dtype).contiguous()


def _forward_fake(input, qweight, scales, offsets, bias):
    return input.new_empty((*input.shape[:-1], qweight.shape[0]))


def _backward_fake(grad_output, qweight, scales, offsets):
    return grad_output.new_empty((*grad_output.shape[:-1], qweight.shape[1] * 8))


def _setup_context(ctx, inputs, output):
    _, qweight, scales, offsets, bias = inputs
    ctx.save_for_backward(qweight, scales, offsets)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _autograd(ctx, grad_output):
    dx = dbias = None
    if ctx.needs_input_grad[0]:
        dx = _backward_op(grad_output, *ctx.saved_tensors)
    if ctx.needs_input_grad[4]:
        dbias = _rows(grad_output).sum(0).to(ctx.bias_dtype)
    return dx, None, None, None, dbias


_forward_op = runtime.register(
    "int4_gemm(Tensor input, Tensor qweight, Tensor scales, Tensor offsets, Tensor? bias) -> Tensor",
    _forward,
    _forward_fake,
    setup_context=_setup_context,
    backward=_autograd,
)
_backward_op = runtime.register(
    "int4_gemm_backward(Tensor grad_output, Tensor qweight, Tensor scales, Tensor offsets) -> Tensor",
    _backward,
    _backward_fake,
)
