"""The autotune config table: tuned rows in JSON, and the deterministic choice among them."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .device import DeviceFacts
from .launch import forget_signatures

DEFAULT_SHARED_MEMORY = 65_536  # what the smallest supported GPUs (sm_75, gfx9) give a program


@dataclass(frozen=True)
class Row:
    """One line of ``configs.json``.

    Attributes:
        kernel: the kernel's name in the catalogue entry.
        arch: ``"sm_90"``, ``"gfx942"``, …, or ``"any"``.
        config: block sizes and other compile-time values, with ``num_warps`` and ``num_stages``.
        bucket: the problem size this row was made for, such as ``{"width": 4096}``; empty fits all.
        dtype: ``"bfloat16"``, …; None fits all. bfloat16 and float16, alike in cost, stand in for each other.
        shared: bytes of shared memory that the compiled kernel may need at most.
        measured: GPU, driver, torch and triton versions and the figure; None if the row was never timed.
    """

    kernel: str
    arch: str
    config: Mapping[str, Any]
    bucket: Mapping[str, int]
    dtype: str | None
    shared: int
    measured: Mapping[str, Any] | None

    def dtype_rank(self, dtype: str) -> int | None:
        """0 for a row made for the dtype, more for one that fits too, None for one that does not."""
        if self.dtype in (dtype, None):
            return 0 if self.dtype else 2
        return 1 if {self.dtype, dtype} == {"bfloat16", "float16"} else None

    def distance(self, bucket: Mapping[str, int]) -> float:
        """How far the row's bucket is from a problem, in doublings summed over the bucket's keys."""
        return sum(abs(math.log2(max(bucket[k], 1) / max(v, 1))) for k, v in self.bucket.items())


def _family(arch: str) -> tuple[str, int]:
    """("sm", 90) of sm_90 and ("gfx9", 0x42) of gfx942: what is comparable, and the order within it."""
    if match := re.fullmatch(r"sm_(\d+)", arch):
        return "sm", int(match[1])
    if match := re.fullmatch(r"(gfx\d+)([0-9a-f]{2})", arch):
        return match[1], int(match[2], 16)
    return arch, 0


class ConfigTable:
    """The rows of one entry's ``configs.json``.

    The file is ``{"rows": [row, …]}`` with a row a line; a row has the fields of :class:`Row`, of which
    ``kernel``, ``arch`` and ``config`` are required.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = tuple(self._read(path))
        self._lookup_cached = functools.cache(self._lookup)
        self._trial: dict[str, tuple[Mapping[str, Any], dict[str, int]]] = {}

    @staticmethod
    def _read(path: Path) -> Iterator[Row]:
        for row in json.loads(path.read_text())["rows"]:
            yield Row(
                kernel=row["kernel"],
                arch=row["arch"],
                config=row["config"],
                bucket=row.get("bucket", {}),
                dtype=row.get("dtype"),
                shared=row.get("shared", DEFAULT_SHARED_MEMORY),
                measured=row.get("measured"),
            )

    def lookup(self, kernel: str, device: DeviceFacts, dtype: str, **bucket: int) -> dict[str, Any]:
        """The config for a problem: exact architecture, else an older one of its family, else ``"any"``;
        within it the row of the nearest bucket. Rows that need more shared memory than the device has are passed over.

        Same arguments, same table: same config.
        """
        if kernel in self._trial:
            config, seen = self._trial[kernel]
            seen.update(bucket)
            return dict(config)
        return dict(self.row(kernel, device, dtype, **bucket).config)

    def row(self, kernel: str, device: DeviceFacts, dtype: str, **bucket: int) -> Row:
        """The row whose config :meth:`lookup` gives."""
        return self._lookup_cached(kernel, device, dtype, tuple(sorted(bucket.items())))

    @contextlib.contextmanager
    def trial(self, kernel: str, config: Mapping[str, Any]) -> Iterator[dict[str, int]]:
        """Inside this context the kernel runs with ``config``, whatever the rows say: for tuning.

        Yields the bucket that the kernel asked for; it is filled by the first launch.
        """
        seen: dict[str, int] = {}
        self._trial[kernel] = config, seen
        forget_signatures()
        try:
            yield seen
        finally:
            del self._trial[kernel]
            forget_signatures()

    def _lookup(self, kernel: str, device: DeviceFacts, dtype: str, bucket: tuple[tuple[str, int], ...]) -> Row:
        fitting = [
            row
            for row in self.rows
            if row.kernel == kernel and row.dtype_rank(dtype) is not None and row.shared <= device.shared_memory
        ]
        for arch in self._arch_chain(device.arch):
            if rows := [row for row in fitting if row.arch == arch]:
                # At the same distance the row made for the dtype goes first; then the file's order.
                return min(rows, key=lambda row: (row.distance(dict(bucket)), row.dtype_rank(dtype)))
        raise LookupError(f"{self.path} has no row for kernel {kernel!r}, dtype {dtype!r} that fits {device}")

    def _arch_chain(self, arch: str) -> list[str]:
        family, number = _family(arch)
        older = {row.arch for row in self.rows if _family(row.arch)[0] == family and _family(row.arch)[1] <= number}
        return [*sorted(older, key=lambda a: -_family(a)[1]), "any"]
