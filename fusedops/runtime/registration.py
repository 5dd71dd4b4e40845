"""Registering an operator with PyTorch: schema, one implementation for every device, fake version, autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("fusedops", "FRAGMENT")


def register(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Any:
    """Register ``fusedops::<name>`` as an opaque operator and return its ``OpOverload``.

    Opaque, so that ``torch.compile``, ``torch.export`` and opcheck see one operator with a fake version, on a machine
    with a GPU or without (``triton_op`` would be traced through, and fails where no GPU driver is).

    Args:
        schema: such as ``"rms_norm(Tensor input, Tensor? weight, float eps) -> (Tensor, Tensor)"``.
        implementation: called with real tensors of any device.
        fake: returns empty tensors with the shapes, strides and dtypes that ``implementation`` returns.
        setup_context: ``(ctx, inputs, output)``, as of ``torch.library.register_autograd``.
        backward: ``(ctx, *grads)``; None for an operator without a gradient.
    """
    name = schema.partition("(")[0]
    qualname = f"fusedops::{name}"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    torch.library.register_fake(qualname, fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(qualname, backward, setup_context=setup_context, lib=_library)
    return getattr(torch.ops.fusedops, name).default
