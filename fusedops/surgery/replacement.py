"""Put fused modules in the place of a model's own, and put the model's own back."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from .report import Item, Report
from .selection import Patterns, Selection
from .table import FUSED, REPLACEMENTS, class_path

_ORIGINAL = "_fusedops_original"
_LOOKS_LIKE_ONE = ("RMSNorm", "LayerNorm", "Softmax", "MultiheadAttention")


def swap(
    model: torch.nn.Module,
    include: Patterns = None,
    exclude: Patterns = None,
    dry_run: bool = False,
    *,
    attention: bool = True,
) -> Report:
    """Put fused modules in the place of the model's norms, softmaxes and attention.

    Replaced are modules of exactly the classes in ``fusedops.surgery.table`` (torch's LayerNorm, RMSNorm, Softmax,
    LogSoftmax and MultiheadAttention, the RMSNorms of transformers' Llama, Mistral, Qwen, Gemma, Phi-3, OLMo and kin),
    and the attention function of transformers models. Parameters and buffers stay the very same objects, with their
    names; so do hooks, eps and the training flag. Only this model changes, no class and no other model: a transformers
    config is copied before its attention implementation is set. :func:`unswap` undoes it; a second call finds nothing.

    Args:
        model: changed in place.
        include: module paths or classes to restrict the change to; see :class:`~fusedops.surgery.selection.Selection`.
        exclude: module paths or classes to leave alone.
        dry_run: change nothing, and report what would be done.
        attention: whether to set the attention function of transformers models, each as a whole.

    Returns:
        The report of what was replaced, and of what was left alone and why.

    Raises:
        ValueError: a path in ``include`` or ``exclude`` matches no module. Nothing was changed then.
    """
    selection = Selection(model, include, exclude)
    report = Report()
    replacements: dict[torch.nn.Module, torch.nn.Module] = {}
    for path, module in model.named_modules():
        fused = REPLACEMENTS.get(class_path(type(module)))
        if reason := _reason_to_leave(module, path, fused, selection):
            report.items.append(Item(path, type(module).__name__, reason=reason))
        elif fused is not None:
            report.items.append(Item(path, type(module).__name__, by=f"fusedops.nn.{fused.__name__}"))
            replacements[module] = _fuse(module, fused)

    switched = []
    integration = _transformers_integration()
    for path, part in integration.outermost_models(model) if attention and integration else ():
        reason = selection.reason_to_skip(part) or integration.reason_to_leave(part)
        by = "" if reason else "fusedops.functional.scaled_dot_product_attention"
        report.items.append(Item(path, f"{type(part).__name__}'s attention", by, reason))
        if not reason:
            switched.append(part)

    if not dry_run:
        install(model, replacements)
        enabled = []
        try:
            for part in switched:
                integration.enable(part)
                enabled.append(part)
        except BaseException:
            for part in enabled:
                integration.disable(part)
            install(model, {new: old for old, new in replacements.items()})
            raise
    return report


def unswap(model: torch.nn.Module) -> Report:
    """Put back the very modules that :func:`swap` took out, with the parameters and settings as they are now.

    Args:
        model: changed in place.

    Returns:
        The report. A fused module that was given another class since (by a parametrization, say) is left alone.
    """
    report = Report()
    replacements: dict[torch.nn.Module, torch.nn.Module] = {}
    for path, module in model.named_modules():
        original = module.__dict__.get(_ORIGINAL)
        if original is None:
            continue
        what = type(module).__name__
        if type(module) not in FUSED:
            report.items.append(Item(path, what, reason="its class was changed since"))
            continue
        report.items.append(Item(path, what, by=class_path(type(original))))
        state = {name: value for name, value in module.__dict__.items() if name != _ORIGINAL}
        original.__dict__.clear()
        original.__dict__.update(state)
        replacements[module] = original
    install(model, replacements)
    if integration := _transformers_integration():
        for path, part in integration.outermost_models(model):
            if before := integration.disable(part):
                report.items.append(Item(path, f"{type(part).__name__}'s attention", by=before))
    return report


def install(model: torch.nn.Module, replacements: Mapping[torch.nn.Module, torch.nn.Module]) -> None:
    """Put each value in its key's place, wherever the model registers it; all of them or, on an error, none."""
    done = []
    try:
        for parent in list(model.modules()):
            for name, child in list(parent._modules.items()):
                if child is not None and child in replacements:
                    parent._modules[name] = replacements[child]
                    done.append((parent, name, child))
    except BaseException:
        for parent, name, child in done:
            parent._modules[name] = child
        raise


def reason_to_keep_forward(module: torch.nn.Module) -> str:
    """Why a module's forward must not be replaced, although its class is known; empty if it may."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if type(module).forward.__module__ != type(module).__module__:
        return f"its class's forward was replaced by {type(module).forward.__module__}"
    if module.__dict__.get("_compiled_call_impl") is not None:
        return "it was compiled with .compile()"
    return ""


def _reason_to_leave(
    module: torch.nn.Module, path: str, fused: type[torch.nn.Module] | None, selection: Selection
) -> str:
    cls = type(module)
    if fused is None:
        if cls in FUSED:
            return "already fused"
        for base in cls.__mro__[1:]:
            if class_path(base) in REPLACEMENTS and base not in FUSED:
                return f"a subclass of {base.__name__}; only the exact class is replaced"
        return f"no replacement for {class_path(cls)}" if cls.__name__.endswith(_LOOKS_LIKE_ONE) else ""
    if not path:
        return "it is the model itself; swap replaces what is inside a model"
    if reason := selection.reason_to_skip(module):
        return reason
    eps_name = getattr(fused, "eps_name", None)
    if eps_name and eps_name not in module.__dict__:
        return f"it has no {eps_name}"
    return reason_to_keep_forward(module)


def _fuse(module: torch.nn.Module, fused: type[torch.nn.Module]) -> torch.nn.Module:
    """A module of the fused class that shares the old one's parameter, buffer, module and hook dictionaries, and keeps
    the old one outside the module tree.
    """
    new = fused.__new__(fused)
    new.__dict__.update(module.__dict__)
    new.__dict__[_ORIGINAL] = module
    return new


def _transformers_integration() -> Any:
    """Our integration, if transformers is in use in this process; it is not imported to find out."""
    if "transformers.modeling_utils" not in sys.modules:
        return None
    from fusedops.integrations import transformers

    return transformers
