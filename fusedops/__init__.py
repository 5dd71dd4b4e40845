"""Fused Triton kernels for PyTorch models, with a prebuilt catalogue.

- :mod:`fusedops.functional`: one function per operation, with the signatures of ``torch.nn.functional``.
- :mod:`fusedops.nn`: drop-in modules.
- :func:`swap`, :func:`unswap`, :func:`quantize`: whole models.
- :mod:`fusedops.catalog`: the kernels themselves.

Names are loaded when they are first used: importing fusedops needs no GPU, no triton and no transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import catalog, formats, functional, integrations, nn, surgery
    from .runtime import FallbackWarning, strict
    from .surgery import quantize, swap, unswap

__version__ = "0.1.0"

_MODULES = ("catalog", "formats", "functional", "integrations", "nn", "runtime", "surgery")
_NAMES = {
    "FallbackWarning": "runtime",
    "strict": "runtime",
    "quantize": "surgery",
    "swap": "surgery",
    "unswap": "surgery",
}

__all__ = [
    "FallbackWarning",
    "catalog",
    "formats",
    "functional",
    "integrations",
    "nn",
    "quantize",
    "strict",
    "surgery",
    "swap",
    "unswap",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_NAMES})
