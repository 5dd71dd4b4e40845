"""The grid of kernels that walk rows, and of those whose programs share a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .device import DeviceFacts, facts
from .launch import prepare

if TYPE_CHECKING:
    from fusedops.catalog import Entry

_FEW_ROWS, _FEW_ELEMENTS = 16, 32_768


def row_grid(config: dict[str, Any], rows: int, device: DeviceFacts) -> int:
    """The number of programs for row blocks of ``BLOCK_M``; takes ``PROGRAMS`` out of the config.

    ``PROGRAMS`` programs a multiprocessor walk over the blocks; 0 starts one program a block.
    """
    blocks = -(-rows // config["BLOCK_M"])
    programs = config.pop("PROGRAMS")
    return min(blocks, device.multiprocessors * programs) if programs else blocks


def one_program(rows: int, width: int) -> bool:
    """Whether one program walks over all rows and writes a weight's whole gradient: it takes less than the host."""
    return rows <= _FEW_ROWS and rows * width <= _FEW_ELEMENTS


class Split(NamedTuple):
    """How the programs of a cooperative launch share rows: each row has ``splits`` chunks of ``chunk`` columns."""

    groups: int  # rows in work at a time
    splits: int
    chunk: int

    @property
    def grid(self) -> tuple[int]:
        """All programs, which have to be resident at once."""
        return (self.groups * self.splits,)


def split_rows(config: Mapping[str, Any], rows: int, width: int, device: DeviceFacts) -> Split | None:
    """The split for a config with ``BLOCK_N`` columns and ``PROGRAMS`` resident programs a multiprocessor.

    None where a row has more chunks than there are programs.
    """
    splits = -(-width // config["BLOCK_N"])
    resident = device.multiprocessors * config["PROGRAMS"]
    chunk = -(-width // splits)
    chunk += -chunk % 16  # wide loads need a chunk's first address to be a multiple of 16
    return Split(min(rows, resident // splits), splits, chunk) if splits <= resident else None


def partial_sums(
    entry: Entry, kernel: Any, input: torch.Tensor, programs: int, width: int, second: bool = False
) -> Callable[..., None]:
    """What adds up the shares of a weight's gradient [programs, width] float32, or two times that, to [width] (each).

    Args:
        entry: its table has a config for ``sum_partials``.
        kernel: :func:`fusedops.runtime.tile.sum_partials`.
        input: a tensor on the device.
        programs: how many shares there are.
        width: the size of the gradient.
        second: whether there is a second gradient, such as the bias's, with its shares after all of the first one's.

    Returns:
        ``(shares, first, second)``, to be called with tensors.
    """
    config = entry.configs.lookup("sum_partials", facts(input.device), "float32")
    grid = (-(-width // config["BLOCK_N"]), 1 + second)
    return prepare(kernel, grid, input.device, programs, width, programs * width, **config)
