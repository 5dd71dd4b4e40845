"""Linear layers with quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from fusedops import functional
from fusedops.catalog.fp8_gemm.op import quantize_fp8
from fusedops.catalog.int4_gemm import layout


class _QuantizedLinear(torch.nn.Module):
    """What quantized linears share: packed buffers that only ever change their device, and a bias like any other.

    ``.half()``, ``.to(dtype)`` and their kin convert the bias alone; ``load_state_dict`` takes the packed tensors bit
    for bit, or refuses them with their name and both shapes or dtypes.
    """

    # buffer → the dtypes that it may have
    packed: ClassVar[dict[str, tuple[torch.dtype, ...]]] = {}
    in_features: int
    out_features: int

    def _set_bias(self, bias: torch.Tensor | None) -> None:
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"bias must have the shape [{self.out_features}] of out_features, got {list(bias.shape)}")
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias)
        self.register_parameter("bias", bias)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = {name: self._buffers[name] for name in self.packed}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # pickle can't read float8 storages (torch.load can)
        buffers = dict(self._buffers)
        for name, buffer in buffers.items():
            if buffer is not None and buffer.dtype == torch.float8_e4m3fn:
                buffers[name] = buffer.view(torch.uint8)
        return self.__dict__ | {"_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.dtype == torch.uint8:
                self._buffers[name] = buffer.view(self.packed[name][0])

    def _load_from_state_dict(
        self,
        state_dict: dict[str, torch.Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name, dtypes in self.packed.items():
            new, old = state_dict.get(prefix + name), self._buffers[name]
            if new is None:
                continue
            if new.dtype not in dtypes:
                error_msgs.append(
                    f"dtype mismatch for {prefix}{name}: {new.dtype} in the checkpoint, not one of {dtypes}"
                )
                return
            if old is None:
                self.register_buffer(name, torch.empty_like(new, device=next(self.buffers()).device))
            elif new.dtype != old.dtype and new.shape == old.shape:
                self._buffers[name] = torch.empty_like(old, dtype=new.dtype)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _require_weight(kind: str, weight: torch.Tensor) -> None:
    if weight.dim() != 2 or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise TypeError(
            f"{kind}: weight must be a float32, bfloat16, float16 or float64 matrix, "
            f"got {weight.dtype} of shape {list(weight.shape)}"
        )


class Int4Linear(_QuantizedLinear):
    """``torch.nn.Linear`` with 4-bit weights: w[n, k] = scales[n, k // g]·q[n, k] + offsets[n, k // g].

    Args:
        in_features: K, a multiple of 32 and of ``group_size``.
        out_features: N.
        bias: whether there is a bias.
        group_size: g: 32, 64, 128 or K.
        device: of all tensors.
        dtype: of scales and bias; offsets are float32. A checkpoint may have either in another dtype, and keeps it.

    Attributes:
        qweight: [N, K / 8] int32, zero in a fresh module.
        scales: [N, K / g].
        offsets: [N, K / g].
        bias: [N], the only parameter.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    bias: torch.nn.Parameter | None

    _FLOATS = (torch.float16, torch.bfloat16, torch.float32)
    packed: ClassVar = {"qweight": (torch.int32,), "scales": _FLOATS, "offsets": _FLOATS}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group_size: int = 128,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        layout.check_group_size("Int4Linear", in_features, group_size)
        groups = in_features // group_size
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        self.register_buffer("qweight", torch.zeros(out_features, in_features // 8, dtype=torch.int32, device=device))
        self.register_buffer("scales", torch.zeros(out_features, groups, dtype=dtype, device=device))
        self.register_buffer("offsets", torch.zeros(out_features, groups, dtype=torch.float32, device=device))
        self._set_bias(torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, group_size: int = 128, symmetric: bool = False) -> Int4Linear:
        """Quantize a linear layer; the bias stays the same Parameter.

        Args:
            linear: with a floating-point weight [N, K].
            group_size: columns that share a scale and an offset: 32, 64, 128 or K.
            symmetric: offsets of −8·scale, so that zero stays zero, instead of one from each group's least value.
        """
        _require_weight("Int4Linear", linear.weight)
        weight = linear.weight.detach()
        weight = weight.float() if weight.dtype == torch.float64 else weight
        qweight, scales, offsets = layout.quantize(weight, group_size, symmetric)
        return cls.from_packed(qweight, scales, offsets, linear.bias).train(linear.training)

    @classmethod
    def from_packed(
        cls, qweight: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Int4Linear:
        """A layer that holds these very tensors; see the class for their shapes.

        Raises:
            ValueError: the shapes do not fit each other.
            TypeError: a dtype is none of the accepted ones.
        """
        for (name, dtypes), tensor in zip(cls.packed.items(), (qweight, scales, offsets), strict=True):
            if tensor.dtype not in dtypes:
                raise TypeError(f"{name} must have one of the dtypes {dtypes}, got {tensor.dtype}")
            if tensor.dim() != 2 or tensor.shape[0] != qweight.shape[0]:
                raise ValueError(f"{name} must be a matrix of {qweight.shape[0]} rows, got shape {list(tensor.shape)}")
        in_features = qweight.shape[1] * 8
        groups = scales.shape[1]
        if scales.shape != offsets.shape or not groups or in_features % groups:
            raise ValueError(
                f"scales and offsets must have one column a group of the {in_features} columns of the weight, "
                f"got the shapes {list(scales.shape)} and {list(offsets.shape)}"
            )
        layer = cls(in_features, qweight.shape[0], False, in_features // groups, device="meta")
        layer.qweight, layer.scales, layer.offsets = qweight, scales, offsets
        layer._set_bias(bias)
        return layer

    @property
    def weight(self) -> torch.Tensor:
        """The weight [N, K], dequantized anew at each access, for code that reads it or its dtype."""
        return self.dequantize()

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight [N, K] in a dtype, by default the bias's, or that of the scales."""
        default = self.scales.dtype if self.bias is None else self.bias.dtype
        return layout.dequantize(self.qweight, self.scales, self.offsets, dtype or default)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] → [..., N]."""
        return functional.int4_linear(input, self.qweight, self.scales, self.offsets, self.bias)

    def extra_repr(self) -> str:
        """The sizes."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"group_size={self.group_size}"
        )


class FP8Linear(_QuantizedLinear):
    """``torch.nn.Linear`` with float8 weights; activations are rounded to float8 row by row, or with ``input_scale``.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is a bias.
        scale: ``"row"``, a weight scale for each output feature, or ``"tensor"``, one for all.
        device: of all tensors.
        dtype: of the bias.

    Attributes:
        weight: [N, K] float8_e4m3fn, zero in a fresh module; the value is weight · weight_scale.
        weight_scale: float32, [N] or [].
        input_scale: float32 [], or None for scales found at each call.
        bias: [N], the only parameter.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor | None
    bias: torch.nn.Parameter | None

    packed: ClassVar = {
        "weight": (torch.float8_e4m3fn,),
        "weight_scale": (torch.float32,),
        "input_scale": (torch.float32,),
    }

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        scale: str = "row",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_scale(scale)
        self.in_features, self.out_features = in_features, out_features
        shape = (out_features,) if scale == "row" else ()
        weight = torch.zeros(out_features, in_features, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", torch.ones(shape, dtype=torch.float32, device=device))
        self.register_buffer("input_scale", None)
        self._set_bias(torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, scale: str = "row") -> FP8Linear:
        """Quantize a linear layer, with a scale for each output feature (``"row"``) or one for all (``"tensor"``); the
        bias stays the same Parameter.
        """
        _check_scale(scale)
        _require_weight("FP8Linear", linear.weight)
        weight, weight_scale = quantize_fp8(linear.weight.detach(), -1 if scale == "row" else None)
        return cls.from_packed(weight, weight_scale, bias=linear.bias).train(linear.training)

    @classmethod
    def from_packed(
        cls,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> FP8Linear:
        """A layer that holds these very tensors; see the class for their shapes.

        Raises:
            ValueError: the shapes do not fit each other.
            TypeError: a dtype is not the accepted one.
        """
        for (name, dtypes), tensor in zip(cls.packed.items(), (weight, weight_scale, input_scale), strict=True):
            if tensor is not None and tensor.dtype not in dtypes:
                raise TypeError(f"{name} must have the dtype {dtypes[0]}, got {tensor.dtype}")
        if weight.dim() != 2 or weight_scale.shape not in ((), weight.shape[:1]):
            raise ValueError(
                "weight must be [N, K] and weight_scale [N] or [], "
                f"got {list(weight.shape)} and {list(weight_scale.shape)}"
            )
        if input_scale is not None and input_scale.dim():
            raise ValueError(f"input_scale must be a scalar tensor, got shape {list(input_scale.shape)}")
        scale = "row" if weight_scale.dim() else "tensor"
        layer = cls(weight.shape[1], weight.shape[0], False, scale, device="meta")
        layer.weight, layer.weight_scale, layer.input_scale = weight, weight_scale, input_scale
        layer._set_bias(bias)
        return layer

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight [N, K] in a dtype, by default the bias's, or float32."""
        default = torch.float32 if self.bias is None else self.bias.dtype
        scale = self.weight_scale.unsqueeze(-1) if self.weight_scale.dim() else self.weight_scale
        return (self.weight.float() * scale).to(dtype or default)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., K] → [..., N]."""
        return functional.fp8_linear(input, self.weight, self.weight_scale, self.input_scale, self.bias)

    def extra_repr(self) -> str:
        """The sizes and the kind of scale."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scale={'row' if self.weight_scale.dim() else 'tensor'!r}"
        )


def _check_scale(scale: str) -> None:
    if scale not in ("row", "tensor"):
        raise ValueError(f"scale must be 'row' or 'tensor', got {scale!r}")
