"""Judging an operator by its NumPy float64 reference: what the tests and ``fusedops verify`` share."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fusedops import runtime

from . import Array, Draw, Entry, Operator, Sample

LAYOUTS = ("contiguous", "transposed", "sliced", "expanded")


class RandomDraw:
    """Draws from a seeded generator, where no hypothesis is at hand."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        """An integer from ``low`` to ``high``, both included."""
        return self._random.randint(low, high)

    def choice(self, options: Sequence[Any]) -> Any:
        """One of ``options``."""
        return self._random.choice(options)


def materialize(sample: Sample, dtype: torch.dtype, device: str, seed: int, draw: Draw | None = None) -> dict[str, Any]:
    """The sample with a tensor in place of each :class:`Array`; with ``draw``, in layouts that it chooses."""
    generator = torch.Generator().manual_seed(seed)
    arguments = {}
    for name, value in sample.items():
        if isinstance(value, Array):
            layout = draw.choice(LAYOUTS) if draw and value.strided and value.shape else "contiguous"
            tensor = with_layout(_values(value, dtype, generator).to(device), layout)
            arguments[name] = tensor.requires_grad_(value.grad)
        else:
            arguments[name] = value
    return arguments


def _values(array: Array, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    target = getattr(torch, array.dtype) if array.dtype else dtype
    if target == torch.bool:
        return torch.randint(2, array.shape, generator=generator).bool()
    if array.values == "bits":
        info = torch.iinfo(target)
        return torch.randint(info.min, info.max, array.shape, generator=generator, dtype=target)
    if array.values == "index":
        return torch.randint(0, int(array.scale), array.shape, generator=generator, dtype=target)
    make = {"normal": torch.randn, "uniform": torch.rand}[array.values]
    values = make(array.shape, generator=generator, dtype=torch.float64) * array.scale + array.offset
    # Older casts to float8 give NaN beyond the largest value, newer ones saturate.
    limit = torch.finfo(target).max
    return values.clamp(-limit, limit).to(target)


def with_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides; what lies between the values is NaN, so that an over-read shows."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        shape = [*tensor.shape[:-1], tensor.shape[-1] + 7]
        padded = torch.full(shape, float("nan"), device=tensor.device).to(tensor.dtype)
        padded[..., 3:-4] = tensor
        return padded[..., 3:-4]
    if layout == "expanded" and tensor.dim() > 1 and tensor.shape[0]:
        return tensor[:1].expand_as(tensor)
    return tensor


def to_numpy(value: Any) -> Any:
    """Floating tensors as float64 arrays, others as they are; anything else unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value.double().numpy() if value.is_floating_point() else value.numpy()


def error(result: torch.Tensor, reference: np.ndarray, scale: float = 0.0) -> float:
    """‖result − reference‖ / ‖reference‖ in root mean squares; infinite where NaN, inf or the shape differ.

    Args:
        result: what the operator gave.
        reference: what is right.
        scale: the root mean square that counts where the reference's is smaller, because its terms cancelled.
    """
    actual = to_numpy(result)
    if actual.shape != reference.shape:
        return float("inf")
    limits = torch.finfo(result.dtype)
    reference = np.where(np.abs(reference) > limits.max, np.copysign(np.inf, reference), reference)
    finite = np.isfinite(reference)
    if not np.array_equal(actual[~finite], reference[~finite], equal_nan=True):
        return float("inf")
    # Below the smallest normal number a dtype has absolute, not relative, precision.
    scale = max(root_mean_square(reference[finite]), scale, limits.smallest_normal)
    return root_mean_square(actual[finite] - reference[finite]) / scale


def root_mean_square(values: np.ndarray) -> float:
    """The root of the mean of the squares; 0 of nothing."""
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0


def _natural_size(grad_output: np.ndarray, output: np.ndarray, argument: np.ndarray) -> float:
    """A gradient's size where its terms do not cancel: grad_output·output/argument, row by row if they share rows."""
    axis = -1 if argument.shape[:-1] == output.shape[:-1] and argument.ndim > 1 else None
    sizes = [np.sqrt(np.mean(array**2, axis=axis)) for array in (grad_output, output, argument) if array.size]
    return root_mean_square(sizes[0] * sizes[1] / np.where(sizes[2] > 0, sizes[2], 1.0)) if len(sizes) == 3 else 0.0


def tolerance(operator: Operator, dtype: torch.dtype, eager_error: float = 0.0) -> float:
    """What :func:`error` may be: 1.25 times PyTorch's own, and never less than some roundings of the dtype.

    Two for the narrow dtypes, whose arithmetic is float32's; eight for float32, which has no wider one.
    """
    name = str(dtype).removeprefix("torch.")
    roundings = 2 if torch.finfo(dtype).bits < 32 else 8
    # An eager version that gives NaN or inf here sets no bar.
    return max(
        operator.tolerance.get(name, roundings * torch.finfo(dtype).eps),
        1.25 * eager_error if math.isfinite(eager_error) else 0.0,
    )


class Judged(NamedTuple):
    """The outcome of one comparison."""

    what: str  # "output" ("output 0", … of several), or the argument whose gradient it is
    error: float
    tolerance: float
    eager_error: float | None

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; NaN is not."""
        return self.error <= self.tolerance


def judge(entry: Entry, operator: Operator, arguments: dict[str, Any], seed: int) -> list[Judged]:
    """Run the operator, forward and backward, and compare each result with the float64 reference.

    Where the operator names what PyTorch users write instead (``eager``), its error on the same inputs counts too.
    """
    values = {name: to_numpy(value) for name, value in arguments.items()}
    differentiate = operator.backward is not None
    outputs, gradients, grad_outputs = _run(entry.load("op", operator.name), arguments, seed, differentiate)
    expected = _named(operator.reference(**values))
    scales = dict.fromkeys(expected, 0.0)
    if operator.backward is not None:
        incoming = tuple(map(to_numpy, grad_outputs))
        main = next(iter(expected.values()))
        main = np.where(np.isfinite(main), main, 0.0)
        for name, gradient in operator.backward(incoming if len(incoming) > 1 else incoming[0], **values).items():
            expected[name] = gradient
            size = np.ones_like(values[name]) if name in operator.scores else values[name]
            scales[name] = _natural_size(incoming[0], main, size)

    def errors(outputs: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]) -> dict[str, float]:
        return {what: error(result, expected[what], scales[what]) for what, result in (outputs | gradients).items()}

    ours = errors(outputs, gradients)
    eager: dict[str, float] = {}
    if operator.eager:
        # PyTorch refuses some calls ("no kernel found to launch" for float32 attention on a GPU): then it sets no bar.
        with contextlib.suppress(RuntimeError):
            eager = errors(*_run(entry.load("op", operator.eager), arguments, seed, differentiate)[:2])
    dtypes = {name: result.dtype for name, result in (outputs | gradients).items()}
    return [
        Judged(what, ours[what], tolerance(operator, dtypes[what], eager.get(what, 0.0)), eager.get(what))
        for what in ours
    ]


def dtypes(entry: Entry, device: str) -> list[str]:
    """The entry's dtypes, less what the interpreter is known to get wrong: bfloat16 operands of tl.dot."""
    skip_bfloat16 = device == "cpu" and runtime.interpreting() and entry.uses_dot
    return [name for name in entry.dtypes if not (skip_bfloat16 and name == "bfloat16")]


class Verdict(NamedTuple):
    """The outcome of many comparisons."""

    ran: str  # which implementation
    worst: Judged  # the one nearest to its tolerance, or furthest over it


def _inhabited(operator: Operator) -> Iterator[tuple[int, Draw, Sample]]:
    for seed in range(10_000):
        draw = RandomDraw(seed)
        sample = operator.sample(draw)
        if not any(isinstance(value, Array) and 0 in value.shape for value in sample.values()):
            yield seed, draw, sample


def verify(entry: Entry, operator: Operator, dtype: str, device: str, seeds: int) -> Verdict:
    """Judge the operator on so many random inputs, in random layouts; empty inputs, which prove little, don't count."""
    on_cpu = torch.device(device).type == "cpu"
    interpreted = runtime.interpreting() and runtime.has_triton()
    ran = set()
    judged: list[Judged] = []
    for seed, draw, sample in itertools.islice(_inhabited(operator), seeds):
        arguments = materialize(sample, getattr(torch, dtype), device, seed, draw)
        try:
            with runtime.strict():
                judged += judge(entry, operator, arguments, seed)
            ran.add("kernel" if not on_cpu else "kernel, interpreted" if interpreted else "PyTorch's version")
        except runtime.NoKernelError as reason:
            judged += judge(entry, operator, arguments, seed)
            ran.add(f"PyTorch's version: {str(reason).partition(': ')[2]}")
    # A NaN error is over every tolerance.
    worst = max(judged, key=lambda one: one.error / one.tolerance if one.error == one.error else math.inf)
    return Verdict("; ".join(sorted(ran)), worst)


def outputs_of(result: Any) -> tuple[Any, ...]:
    """What an operator returned, as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def _named(result: Any) -> dict[str, Any]:
    outputs = outputs_of(result)
    return {f"output {i}" if len(outputs) > 1 else "output": output for i, output in enumerate(outputs)}


def _run(
    function: Any, arguments: dict[str, Any], seed: int, differentiate: bool
) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    result = function(**arguments)
    outputs = outputs_of(result)
    wanted = {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    if not (differentiate and wanted):
        return _named(result), {}, [torch.zeros_like(output) for output in outputs]
    generator = torch.Generator().manual_seed(seed + 1)
    grads = [
        torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype).to(output.device)
        for output in outputs
    ]
    gradients = torch.autograd.grad(outputs, list(wanted.values()), grads)
    return _named(result), dict(zip(wanted, gradients, strict=True)), grads
