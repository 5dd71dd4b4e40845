"""The catalogue: what an entry says of itself, and the walk over all entries.

An entry is a folder of ``kernels/`` (installed as ``fusedops.catalog.<name>``) with four files and an ``ENTRY``:
``kernel.py`` (Triton), ``op.py`` (PyTorch), ``reference.py`` (NumPy, float64) and ``configs.json``. Tests, benches,
the command line and the docs walk :func:`entries`; nothing else lists the kernels.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from fusedops.runtime import ConfigTable

# In a checkout the entries are read from its kernels/ folder, so that a new folder is seen without a reinstall.
# A folder `kernels` with an __init__.py is somebody else's package.
_checkout = Path(__file__).parents[2]
if (_checkout / "pyproject.toml").is_file() and not (_checkout / "kernels" / "__init__.py").exists():
    __path__.append(str(_checkout / "kernels"))


class Draw(Protocol):
    """Where a sampler takes its choices from: hypothesis in the tests, a seeded generator elsewhere."""

    def integer(self, low: int, high: int) -> int:
        """An integer from ``low`` to ``high``, both included."""

    def choice(self, options: Sequence[Any]) -> Any:
        """One of ``options``."""


@dataclass(frozen=True)
class Array:
    """A tensor argument in a sample: the shape and how to fill it.

    Attributes:
        shape: the shape.
        dtype: a torch dtype's name; None for the dtype under test.
        values: ``"normal"``, ``"bits"`` (any bit pattern of an integer dtype), ``"uniform"`` (0 to 1) or
            ``"index"`` (an integer from 0 up to, not including, ``scale``).
        scale: multiplies the values.
        offset: is added to the scaled values.
        grad: whether a gradient flows to this argument.
        strided: whether the harness may give it other strides than the contiguous ones.
    """

    shape: tuple[int, ...]
    dtype: str | None = None
    values: str = "normal"
    scale: float = 1.0
    offset: float = 0.0
    grad: bool = False
    strided: bool = True


Sample = Mapping[str, Any]


@dataclass(frozen=True)
class Operator:
    """One operator of an entry, under its public name.

    Attributes:
        name: the function's name in ``op.py``.
        reference: the same function in NumPy float64; takes the same arguments.
        sample: draws valid arguments, small ones; a tensor is an :class:`Array`.
        shapes: the real sizes, for benchmarks: label → arguments.
        registers: the names under ``torch.ops.fusedops`` that a call with gradients goes through.
        backward: ``(grad_output, **arguments) → {argument: gradient}`` in NumPy float64; None without a gradient.
        smooth: what ``backward`` is the derivative of where the reference rounds on its way (a straight-through
            gradient), with the same arguments; None for the reference itself.
        scores: arguments that are exponentiated, so that a shift of 1, not a change by their size, changes the output.
        eager: the name in ``op.py`` of what a PyTorch user would write instead, the judge of accuracy and speed.
        tolerance: the relative error (Frobenius norm) allowed for a dtype where it is more than the harness's default.
    """

    name: str
    reference: Callable[..., Any]
    sample: Callable[[Draw], Sample]
    shapes: Mapping[str, Sample]
    registers: tuple[str, ...]
    backward: Callable[..., Mapping[str, Any]] | None = None
    smooth: Callable[..., Any] | None = None
    scores: tuple[str, ...] = ()
    eager: str = ""
    tolerance: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel, with the launch signatures to compile ahead of time.

    Attributes:
        function: ``"module:function"`` within the entry's folder.
        signature: argument → Triton type (``"i32"``, ``"fp32"``, ``"*fp32"``); ``"*{dtype}"`` is the row's dtype,
            ``"i32:16"`` an integer that 16 divides.
        variants: the compile-time values that are not in the config table, one mapping a variant; ``"{width}"`` is
            the width in the row's bucket. An argument of the signature that is None here is not given.
        backends: Triton's backends that can compile it: one with inline PTX is for ``"cuda"`` alone.
    """

    function: str
    signature: Mapping[str, str]
    variants: tuple[Mapping[str, Any], ...] = ({},)
    backends: tuple[str, ...] = ("cuda", "hip")


# An entry whose kernels leave shares of a weight's gradient behind has this one to add them up.
SUM_PARTIALS = Kernel(
    "backward:sum_partials",
    {
        "partials_ptr": "*fp32",
        "first_ptr": "*{dtype}",
        "second_ptr": "*{dtype}",
        "count": "i32",
        "width": "i32:16",
        "stride_second": "i32:16",
    },
)


@dataclass(frozen=True)
class Entry:
    """One entry of the catalogue.

    Attributes:
        name: of the folder, of ``fusedops.catalog.<name>``, of its tests and its bench.
        summary: one line.
        source: paper and equation of the algorithm.
        dtypes: names of the torch dtypes that the kernels take.
        limits: what shapes they take, in words.
        operators: the public operators.
        kernels: kernel name (as in ``configs.json``) → kernel.
        uses_dot: the kernels multiply matrices; Triton's interpreter then can't judge bfloat16.
    """

    name: str
    summary: str
    source: str
    dtypes: tuple[str, ...]
    limits: str
    operators: tuple[Operator, ...]
    kernels: Mapping[str, Kernel]
    uses_dot: bool = False

    @property
    def folder(self) -> Path:
        """Where the entry's files are."""
        module = importlib.import_module(f"{__name__}.{self.name}")
        return Path(module.__path__[0])

    @functools.cached_property
    def configs(self) -> ConfigTable:
        """The entry's config table."""
        return config_table(self.folder)

    def load(self, module: str, name: str) -> Any:
        """An object of one of the entry's modules: ``load("op", "rms_norm")``."""
        return getattr(importlib.import_module(f"{__name__}.{self.name}.{module}"), name)


@functools.cache
def config_table(folder: Path) -> ConfigTable:
    """The config table of an entry's folder, read once."""
    from fusedops.runtime import ConfigTable

    return ConfigTable(folder / "configs.json")


def names() -> list[str]:
    """The names of the entries, sorted."""
    return sorted({module.name for module in pkgutil.iter_modules(__path__) if module.ispkg})


def get(name: str) -> Entry:
    """The entry of a name.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    if name not in names():
        raise ValueError(f"no catalogue entry is named {name!r}; there are: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}").ENTRY


def entries() -> Iterator[Entry]:
    """All entries, in the order of their names."""
    return (get(name) for name in names())
