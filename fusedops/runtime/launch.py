"""Launching a Triton kernel where its tensors live, and deciding once what a call's signature alone decides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_LIMIT = 1024  # signatures that an operator remembers: a process that meets ever new shapes must not grow for ever
_memories: list[dict[Any, Any]] = []


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **meta: Any) -> None:
    """Launch on the tensors' own device and its current stream; an empty grid launches nothing."""
    if 0 in grid:
        return
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        kernel[grid](*args, **meta)
    else:
        with torch.cuda.device(device):
            kernel[grid](*args, **meta)


def per_signature(decide: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """An implementation that calls ``decide`` once per signature, and from then on the function that it returned.

    ``decide`` and the function take the same positional arguments. A signature is the dtype, shape, strides, device and
    16-byte alignment of each tensor, and the value of each other argument: what ``decide`` decides (checks, views,
    config, grid) may depend on nothing else. Remembering it takes 2 µs of host time a call in place of 20.
    """
    memory: dict[Any, Callable[..., Any]] = {}
    _memories.append(memory)

    @functools.wraps(decide)
    def implementation(*args: Any) -> Any:
        key = tuple(
            [
                (arg.dtype, arg.shape, arg.stride(), arg.get_device(), arg.data_ptr() % 16 == 0)
                if isinstance(arg, torch.Tensor)
                else arg
                for arg in args
            ]
        )
        run = memory.get(key)
        if run is None:
            if len(memory) >= _LIMIT:
                memory.clear()
            run = memory[key] = decide(*args)
        return run(*args)

    return implementation


def forget_signatures() -> None:
    """Let every operator decide anew, as when a config table's answers change."""
    for memory in _memories:
        memory.clear()


def prepare(
    kernel: Any, grid: tuple[int, ...], device: torch.device, *scalars: Any, **meta: Any
) -> Callable[..., None]:
    """:func:`launch` with all but the tensors given; returns the function of these, the kernel's first arguments.

    Each call must give tensors of the same dtypes and alignments (and None at the same places), as is so within
    :func:`per_signature`. From the second call on the compiled kernel is launched without Triton's look at each
    argument, which costs 18 µs. That needs to know the launcher of Triton's version: another than 3.6 launches in the
    usual way.
    """
    if 0 in grid:
        return lambda *tensors: None

    def usual(*tensors: torch.Tensor | None) -> Any:
        return kernel[grid](*tensors, *scalars, **meta)

    if device.type == "cpu":
        return usual
    index = torch.cuda.current_device() if device.index is None else device.index
    direct: Callable[..., None] | None = None

    def run(*tensors: torch.Tensor | None) -> None:
        nonlocal direct
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return run(*tensors)
        if direct is None:
            compiled = usual(*tensors)
            if _triton_version().startswith("3.6."):
                names = kernel.arg_names[len(tensors) + len(scalars) :]
                direct = _direct(compiled, grid, (*scalars, *(meta[name] for name in names)))
            return None
        stream = torch._C._cuda_getCurrentRawStream(index)
        return direct(stream, [None if tensor is None else tensor.data_ptr() for tensor in tensors])

    return run


def _direct(compiled: Any, grid: tuple[int, ...], rest: tuple[Any, ...]) -> Callable[[int, list[int | None]], None]:
    x, y, z = (*grid, 1, 1)[:3]
    start, function, packed_metadata = compiled.run, compiled.function, compiled.packed_metadata

    def launch(stream: int, pointers: list[int | None]) -> None:
        start(x, y, z, stream, function, packed_metadata, None, None, None, *pointers, *rest)

    return launch


@functools.cache
def _triton_version() -> str:
    import triton

    return triton.__version__
