"""Facts about the device a tensor lives on, and about the targets that kernels are compiled for ahead of time."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """A GPU architecture to compile for.

    Attributes:
        backend: Triton's backend name, ``"cuda"`` or ``"hip"``.
        arch: what Triton's ``GPUTarget`` takes: 90 for sm_90, ``"gfx942"``.
        warp_size: threads in a warp (wavefront).
        shared_memory: bytes of shared memory that one program can use.
    """

    backend: str
    arch: int | str
    warp_size: int
    shared_memory: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 166_912),
    "sm_90": Target("cuda", 90, 32, 232_448),
    "sm_100": Target("cuda", 100, 32, 232_448),
    "sm_120": Target("cuda", 120, 32, 101_376),
    "gfx942": Target("hip", "gfx942", 64, 65_536),
    "gfx950": Target("hip", "gfx950", 64, 163_840),
}


@dataclass(frozen=True)
class DeviceFacts:
    """What the choice of a config and of a grid depends on.

    Attributes:
        arch: ``"sm_90"``, ``"gfx942"``, or ``"interpreter"`` for a CPU.
        name: the vendor's name of the device.
        multiprocessors: number of SMs (compute units).
        shared_memory: bytes of shared memory that one program can use.
    """

    arch: str
    name: str
    multiprocessors: int
    shared_memory: int


_INTERPRETER = DeviceFacts("interpreter", "Triton interpreter", 4, 1 << 30)


@functools.cache
def _gpu_facts(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    arch = properties.gcnArchName.split(":")[0] if hip else f"sm_{properties.major}{properties.minor}"
    known = TARGETS.get(arch)
    shared = getattr(properties, "shared_memory_per_block_optin", None) or properties.shared_memory_per_block
    return DeviceFacts(
        arch, properties.name, properties.multi_processor_count, known.shared_memory if known else shared
    )


def facts(device: torch.device) -> DeviceFacts:
    """The facts of a device; a CPU is the Triton interpreter."""
    if device.type == "cpu":
        return _INTERPRETER
    return _gpu_facts(torch.cuda.current_device() if device.index is None else device.index)
