"""Replace a model's linear layers by quantized ones."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fusedops import nn, runtime
from fusedops.catalog.int4_gemm.layout import check_group_size

from .replacement import install, reason_to_keep_forward
from .report import Item, Report
from .selection import Patterns, Selection
from .table import class_path

SCHEMES = ("int4", "fp8")
_CONV1D = "transformers.pytorch_utils.Conv1D"
_LINEAR = "torch.nn.modules.linear.Linear"
# Classes whose forward reads the weights of these children itself.
_READS_WEIGHTS = {"torch.nn.modules.transformer.TransformerEncoderLayer": ("linear1", "linear2")}
_QUANTIZED = (nn.Int4Linear, nn.FP8Linear)


def quantize(
    model: torch.nn.Module,
    scheme: str,
    group_size: int = 128,
    symmetric: bool = False,
    exclude: Patterns = None,
    include: Patterns = None,
    dry_run: bool = False,
    progress: bool = True,
) -> Report:
    """Replace the model's linear layers by :class:`~fusedops.nn.Int4Linear` or :class:`~fusedops.nn.FP8Linear`.

    Replaced are modules of exactly ``torch.nn.Linear`` and of transformers' ``Conv1D`` (GPT-2's, transposed). The
    output head and layers whose weight is tied to another module's are left alone, unless ``include`` names the head.
    Biases stay the same Parameters; hooks and the training flag are kept. Layers that are quantized already stay.

    Args:
        model: changed in place, after everything was checked and all new layers were made.
        scheme: ``"int4"`` (weights alone) or ``"fp8"`` (weights with a scale a row, activations rounded at each call).
        group_size: for int4, the input features that share a scale: 32, 64, 128 or all of a layer's.
        symmetric: for int4, whether zero weights stay exactly zero.
        exclude: module paths or classes to leave alone; see :class:`~fusedops.surgery.selection.Selection`.
        include: module paths or classes to restrict the change to.
        dry_run: check, change nothing, and report what would be done.
        progress: whether to show a progress bar, on a terminal.

    Returns:
        The report of what was replaced, what was left alone and why, and the model's bytes before and after.

    Raises:
        ValueError: the scheme is unknown, a pattern matches nothing, a layer's size doesn't fit the group size, a
            weight is on the meta device or holds NaN or infinity. The message names the layer. Nothing was changed.
        TypeError: a weight is not floating point.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"quantize: scheme must be one of {', '.join(map(repr, SCHEMES))}, got {scheme!r}")
    selection = Selection(model, include, exclude)
    report = Report()
    chosen = dict(_choose(model, selection, report, "Int4Linear" if scheme == "int4" else "FP8Linear"))
    for path, module in chosen.items():
        _check(path, module, scheme, group_size)
    report.bytes_before = _bytes(model)
    report.bytes_after = report.bytes_before + sum(
        _bytes_of_quantized(module, scheme, group_size) - _tensor_bytes([module.weight]) for module in chosen.values()
    )
    if scheme == "fp8" and (
        lacking := sorted({_without_fp8(module.weight.device) for module in chosen.values()} - {""})
    ):
        report.notes.append(
            f"{', '.join(lacking)} has no float8 arithmetic: it is emulated, which saves memory, not time"
        )
        warnings.warn(f"quantize: {report.notes[-1]}", stacklevel=2)
    if not dry_run:
        new = {
            module: _quantized(module, scheme, group_size, symmetric)
            for module in _with_progress(chosen.values(), len(chosen), progress)
        }
        install(model, new)
    return report


def _choose(model: torch.nn.Module, selection: Selection, report: Report, by: str) -> Iterator[tuple[str, Any]]:
    """The layers to quantize; what becomes of each candidate goes into the report."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in {id(p): p for p in module._parameters.values() if p is not None}.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    read_by_parent = {
        getattr(module, name): class_path(type(module)).rpartition(".")[2]
        for module in model.modules()
        for name in _READS_WEIGHTS.get(class_path(type(module)), ())
    }
    head = _output_head(model)
    for path, module in model.named_modules():
        if isinstance(module, _QUANTIZED):
            reason = "already quantized"
        elif class_path(type(module)) in (_LINEAR, _CONV1D):
            is_head = module is head or path.rpartition(".")[2] == "lm_head"
            reason = (
                ("it is the model itself" if not path else "")
                or selection.reason_to_skip(module)
                or ("its weight is tied to another module's" if owners[id(module.weight)] > 1 else "")
                or (
                    "the output head; name it in include to quantize it"
                    if is_head and not selection.names(module)
                    else ""
                )
                or (f"{read_by_parent[module]} reads its weight directly" if module in read_by_parent else "")
                or reason_to_keep_forward(module)
            )
        elif isinstance(module, torch.nn.Linear):
            reason = "a subclass of Linear; only the exact class is replaced"
        else:
            continue
        report.items.append(Item(path, type(module).__name__, "" if reason else f"fusedops.nn.{by}", reason))
        if not reason:
            yield path, module


def _output_head(model: torch.nn.Module) -> Any:
    try:
        return model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None


def _check(path: str, module: Any, scheme: str, group_size: int) -> None:
    weight = module.weight
    if weight.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"quantize: {path}.weight has dtype {weight.dtype}; exclude the layer, or load it unquantized")
    if weight.device.type == "meta":
        raise ValueError(f"quantize: {path}.weight is on the meta device and has no values; load the weights first")
    if scheme == "int4":
        in_features = _row_major(module).shape[1]
        try:
            check_group_size(path, in_features, group_size)
        except ValueError as error:
            raise ValueError(f"quantize: {error}; pass another group_size, or exclude=[{path!r}]") from error
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(
            f"quantize: {path}.weight holds NaN or infinite values; exclude the layer or mend the checkpoint"
        )


def _row_major(module: Any) -> torch.Tensor:
    """The weight [N, K]."""
    weight = module.weight.detach()
    return weight.T if class_path(type(module)) == _CONV1D else weight


def _quantized(module: Any, scheme: str, group_size: int, symmetric: bool) -> torch.nn.Module:
    weight = _row_major(module)
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    linear.bias = module.bias
    new: torch.nn.Module
    if scheme == "int4":
        new = nn.Int4Linear.from_linear(linear, group_size, symmetric)
    else:
        new = nn.FP8Linear.from_linear(linear)
    own = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
    for name, value in module.__dict__.items():
        if name not in own:
            new.__dict__[name] = value  # hooks, the training flag, attributes that the model's code looks at
    return new


def _bytes_of_quantized(module: Any, scheme: str, group_size: int) -> int:
    out_features, in_features = _row_major(module).shape
    if scheme == "int4":
        scales = torch.float32 if module.weight.dtype == torch.float64 else module.weight.dtype
        return _bytes(nn.Int4Linear(in_features, out_features, False, group_size, "meta", scales))
    return _bytes(nn.FP8Linear(in_features, out_features, False, device="meta"))


def _bytes(model: torch.nn.Module) -> int:
    return _tensor_bytes([*model.parameters(), *model.buffers()])


def _tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _without_fp8(device: torch.device) -> str:
    """The name of a GPU without float8 units; empty for others."""
    if device.type != "cuda":
        return ""
    facts = runtime.facts(device)
    if facts.arch.startswith("sm_"):
        return "" if int(facts.arch.removeprefix("sm_")) >= 89 else facts.name
    return "" if facts.arch >= "gfx942" else facts.name


def _with_progress(modules: Iterable[torch.nn.Module], total: int, wanted: bool) -> Iterable[torch.nn.Module]:
    if not (wanted and sys.stderr.isatty()):
        return modules
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return modules
    return track(modules, "Quantizing", total=total, console=Console(stderr=True), transient=True)
