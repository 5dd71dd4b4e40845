"""What every kernel needs and no kernel is named in: device facts, config tables, dispatch, launching, registration."""

from .configs import ConfigTable, Row
from .device import TARGETS, DeviceFacts, Target, facts
from .dispatch import FallbackWarning, NoKernelError, has_triton, interpreting, strict, use_kernel
from .launch import launch, per_signature, prepare
from .registration import may_reuse, register

__all__ = [
    "TARGETS",
    "ConfigTable",
    "DeviceFacts",
    "FallbackWarning",
    "NoKernelError",
    "Row",
    "Target",
    "facts",
    "has_triton",
    "interpreting",
    "launch",
    "may_reuse",
    "per_signature",
    "prepare",
    "register",
    "strict",
    "use_kernel",
]
