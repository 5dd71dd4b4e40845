"""Registering an operator with PyTorch: schema, one implementation for every device, fake version, autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import (
    _DisableAutocast,
    _functorch,
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
)
from torch.autograd import forward_ad

_library = torch.library.Library("fusedops", "FRAGMENT")


def register(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    forward_only: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register ``fusedops::<name>`` as an opaque operator and return the function that calls it.

    Opaque, so that ``torch.compile``, ``torch.export`` and opcheck see one operator with a fake version, on a machine
    with a GPU or without (``triton_op`` would be traced through, and fails where no GPU driver is).

    The returned function takes positional arguments. Where the dispatcher would have nothing to do (plain tensors,
    nothing tracing) it calls ``implementation`` itself, through ``torch.autograd.Function`` if a gradient is needed,
    which saves 8 µs of host time a call, 30 with a gradient.

    Args:
        schema: such as ``"rms_norm(Tensor input, Tensor? weight, float eps) -> (Tensor, Tensor)"``.
        implementation: called with real tensors of any device.
        fake: returns empty tensors with the shapes, strides and dtypes that ``implementation`` returns.
        setup_context: ``(ctx, inputs, output)``, as of ``torch.library.register_autograd``.
        backward: ``(ctx, *grads)``; None for an operator without a gradient, which raises when one is asked for
            (a second derivative, for a backward operator): PyTorch would only warn, and give a wrong one. The gradient
            of an output that nothing used can be None.
        forward_only: called in place of ``implementation`` where no gradient is needed; outputs that only ``backward``
            reads can be None there.
    """
    name = schema.partition("(")[0]
    qualname = f"fusedops::{name}"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    run = _without_autocast(implementation)
    run_forward = run if forward_only is None else _without_autocast(forward_only)
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(qualname, fake, lib=_library)

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(f"{qualname} has no derivative; use PyTorch's own function here")

    torch.library.register_autograd(qualname, backward or refuse, setup_context=setup_context, lib=_library)
    overload = getattr(torch.ops.fusedops, name).default
    differentiable = _autograd_function(run, setup_context, backward or refuse)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return overload(*args)
        if forward_ad._current_level >= 0 and any(_has_tangent(arg) for arg in args):
            raise NotImplementedError(f"{qualname} has no forward-mode derivative; use PyTorch's own function here")
        if not _is_plain(args):
            return overload(*args)
        if torch.is_grad_enabled():
            for arg in args:
                if isinstance(arg, torch.Tensor) and arg.requires_grad:
                    return differentiable(*args)
        return run_forward(*args)

    return call


def may_reuse(*tensors: torch.Tensor) -> bool:
    """Whether a backward formula may overwrite what its forward saved: nothing traces, the graph is freed behind it."""
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return False
    return _is_plain(tensors)


def _without_autocast(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation chooses its own precision: autocast must not round what it computes in float32."""

    def run(*args: Any) -> Any:
        if _is_any_autocast_enabled():
            with _DisableAutocast():
                return implementation(*args)
        return implementation(*args)

    return run


def _autograd_function(
    run: Callable[..., Any], setup_context: Callable[..., None] | None, backward: Callable[..., Any]
) -> Callable[..., Any]:
    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(False)
            output = run(*args)
            if setup_context is not None:
                setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if all(grad is None for grad in grads):
                return (None,) * len(ctx.needs_input_grad)
            return backward(ctx, *grads)

    # Function.apply itself looks for functorch first, which `call` has done.
    return super(torch.autograd.Function, Derivative).apply


def _has_tangent(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and forward_ad.unpack_dual(arg).tangent is not None


def _is_plain(args: tuple[Any, ...]) -> bool:
    """Whether dispatch modes, functorch, tracing and tensor subclasses have no part in a call."""
    if _len_torch_dispatch_stack() or _get_tracing_state() is not None:
        return False
    if _functorch.peek_interpreter_stack() is not None:
        return False
    for arg in args:
        if isinstance(arg, torch.Tensor) and type(arg) is not torch.Tensor and type(arg) is not torch.nn.Parameter:
            return False
    return True
