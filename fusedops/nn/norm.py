"""Normalisation modules."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from fusedops import functional
from fusedops.catalog.rms_norm import op as _rms_norm


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` with a fused forward and backward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimensions of ``input`` [*, normalized_shape]."""
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` with a fused forward and backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimensions of ``x`` [*, normalized_shape]."""
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class _ModelRMSNorm(torch.nn.Module):
    """The RMSNorm of a model library, with its attributes' names and its order of casts.

    Args:
        hidden_size: the size of the last dimension.
        eps: added to the mean square.
        device: of the weight.
        dtype: of the weight.
    """

    eps_name: ClassVar[str] = "variance_epsilon"
    weight_offset: ClassVar[float] = 0.0
    cast_before_weight: ClassVar[bool] = False

    def __init__(self, hidden_size: int, eps: float = 1e-6, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        initial = torch.full((hidden_size,), 1.0 - self.weight_offset, device=device, dtype=dtype)
        self.weight = torch.nn.Parameter(initial)
        setattr(self, self.eps_name, eps)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of ``hidden_states`` [..., hidden_size]."""
        eps = getattr(self, self.eps_name)
        return _rms_norm.rms_norm(hidden_states, self.weight, eps, self.weight_offset, self.cast_before_weight)

    def extra_repr(self) -> str:
        """The size and eps."""
        return f"{tuple(self.weight.shape)}, eps={getattr(self, self.eps_name)}"


class LlamaRMSNorm(_ModelRMSNorm):
    """Llama's form, and that of most models after it: w · round(x̂), rounded to the input's dtype before the weight."""

    cast_before_weight = True


class Olmo2RMSNorm(_ModelRMSNorm):
    """OLMo 2's form: round(w · x̂)."""


class GemmaRMSNorm(_ModelRMSNorm):
    """Gemma's form: round((1 + w) · x̂), with 1 + w in float32."""

    eps_name = "eps"
    weight_offset = 1.0
