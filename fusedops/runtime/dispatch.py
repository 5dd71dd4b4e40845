"""Which implementation of an operator runs: the Triton kernel, or PyTorch's."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import os
import warnings
from collections.abc import Iterator

import torch

_strict = contextvars.ContextVar("fusedops_strict", default=False)


class FallbackWarning(UserWarning):
    """A GPU tensor was computed by PyTorch, because the kernel does not cover the call."""


class NoKernelError(RuntimeError):
    """Under :func:`strict`: the kernel does not cover the call."""


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Inside this context a call that the kernel does not cover raises :class:`NoKernelError`: no falling back."""
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


def interpreting() -> bool:
    """Whether ``TRITON_INTERPRET=1`` makes Triton run kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def has_triton() -> bool:
    """Whether triton can be imported; it is not imported to find out."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _warn_once(operator: str, reason: str) -> None:
    warnings.warn(f"{operator} runs PyTorch's version: {reason}", FallbackWarning, stacklevel=4)


def use_kernel(operator: str, device: torch.device, unsupported: str | None = None) -> bool:
    """Whether the Triton kernel of ``operator`` runs for tensors on ``device``.

    While ``torch.compile`` traces a caller, a call that is not covered neither warns nor raises.

    Args:
        operator: name for the message.
        device: where the tensors live. A CPU runs the kernel only under the interpreter.
        unsupported: what of this call the kernel does not cover, or None.

    Raises:
        NoKernelError: the call falls back although :func:`strict` is in force.
    """
    if unsupported is None and device.type == "cuda" and has_triton():
        return True
    if torch.compiler.is_compiling():
        return unsupported is None
    if device.type == "cpu" and not (interpreting() and has_triton()):
        return False
    if device.type not in ("cpu", "cuda"):
        return False
    if not has_triton():
        unsupported = "triton is not installed"
    if unsupported is None:
        return True
    if _strict.get():
        raise NoKernelError(f"{operator} has no kernel for this call: {unsupported}")
    if device.type == "cuda":
        _warn_once(operator, unsupported)
    return False
