"""Softmax modules."""

from __future__ import annotations

import torch

from fusedops import functional


class Softmax(torch.nn.Softmax):
    """``torch.nn.Softmax`` with a fused forward and backward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Softmax along ``dim``."""
        return functional.softmax(input, self.dim, _stacklevel=5)


class LogSoftmax(torch.nn.LogSoftmax):
    """``torch.nn.LogSoftmax`` with a fused forward and backward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Log-softmax along ``dim``."""
        return functional.log_softmax(input, self.dim, _stacklevel=5)
