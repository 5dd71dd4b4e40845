"""What the operators ask of their tensors: checks with one wording, and the view as rows that the kernels walk."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


def dtype_name(tensor: torch.Tensor) -> str:
    """``"bfloat16"`` of a tensor in ``torch.bfloat16``."""
    return _name(tensor.dtype)


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unsupported_dtype(tensor: torch.Tensor, accepted: Sequence[str]) -> str | None:
    """Why a kernel with the ``accepted`` dtypes does not cover the tensor; None if it does."""
    name = dtype_name(tensor)
    return None if name in accepted else f"input has dtype {name}, the kernel takes {', '.join(accepted)}"


def check_input(operator: str, input: torch.Tensor) -> None:
    """Refuse what cannot be normalised along its last dimension.

    Raises:
        TypeError: ``input`` is not floating point.
        ValueError: ``input`` is a scalar.
    """
    if not input.is_floating_point():
        raise TypeError(f"{operator}: input must have a floating-point dtype, got {input.dtype}")
    if input.dim() == 0:
        raise ValueError(f"{operator}: input must have at least one dimension, got a scalar")


def check_affine(operator: str, name: str, parameter: torch.Tensor | None, input: torch.Tensor) -> None:
    """Refuse a weight or bias that does not fit the last dimension of ``input``; None fits.

    Raises:
        TypeError: it is not floating point.
        ValueError: its shape or device differs.
    """
    if parameter is None:
        return
    if not parameter.is_floating_point():
        raise TypeError(f"{operator}: {name} must have a floating-point dtype, got {parameter.dtype}")
    if parameter.shape != input.shape[-1:]:
        raise ValueError(
            f"{operator}: {name} must have the shape [{input.shape[-1]}] of input's last dimension, "
            f"got {list(parameter.shape)}"
        )
    if parameter.device != input.device:
        raise ValueError(
            f"{operator}: {name} is on {parameter.device}, input on {input.device}; put both on one device"
        )


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., width] as [rows, width] with unit stride along the width; copies only where no view is possible."""
    rows = tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def check_residual(operator: str, residual: torch.Tensor, input: torch.Tensor) -> None:
    """Refuse a residual that is not like ``input``.

    Raises:
        TypeError: its dtype differs.
        ValueError: its shape or device differs.
    """
    if residual.dtype != input.dtype:
        raise TypeError(f"{operator}: residual has dtype {residual.dtype}, input {input.dtype}; cast to one dtype")
    if residual.shape != input.shape:
        raise ValueError(
            f"{operator}: residual must have input's shape {list(input.shape)}, got {list(residual.shape)}"
        )
    if residual.device != input.device:
        raise ValueError(
            f"{operator}: residual is on {residual.device}, input on {input.device}; put both on one device"
        )


def empty_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of the same shape."""
    if tensor.dtype == dtype and tensor.is_contiguous():
        return torch.empty_like(tensor)
    return tensor.new_empty(tensor.shape, dtype=dtype)


def row_access(tensor: torch.Tensor) -> tuple[int, Callable[[torch.Tensor], torch.Tensor]]:
    """How a kernel reads ``tensor`` as :func:`as_rows` does: the row stride, and what to call on it before each launch.

    For :func:`fusedops.runtime.per_signature`: a tensor that needs no copy is given to the kernel as it is.
    """
    rows = as_rows(tensor)
    return rows.stride(0), _itself if rows.data_ptr() == tensor.data_ptr() else as_rows


def vector_access(vector: torch.Tensor | None) -> Callable[[Any], Any]:
    """What to call on a weight or bias before each launch: kernels take them contiguous."""
    return _itself if vector is None or vector.is_contiguous() else torch.Tensor.contiguous


def _itself(tensor: Any) -> Any:
    return tensor
