"""Launching a Triton kernel where its tensors live."""

from __future__ import annotations

from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **meta: Any) -> None:
    """Launch on the tensors' own device and its current stream; an empty grid launches nothing."""
    if 0 in grid:
        return
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        kernel[grid](*args, **meta)
    else:
        with torch.cuda.device(device):
            kernel[grid](*args, **meta)
