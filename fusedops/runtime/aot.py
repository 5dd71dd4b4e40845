"""Compiling kernels ahead of time, on a machine that needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .configs import Row
from .device import TARGETS

if TYPE_CHECKING:
    from fusedops.catalog import Entry

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "waves_per_eu", "matrix_instr_nonkdim")
_TRITON_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Job:
    """One compilation: a kernel in one variant, with one row's config, for one dtype and target."""

    entry: Entry
    row: Row
    variant: Mapping[str, Any]
    dtype: str
    arch: str

    def __str__(self) -> str:
        config = ",".join(f"{k}={v}" for k, v in {**self.row.bucket, **self.row.config, **self.variant}.items())
        return f"{self.row.kernel}[{self.arch},{self.dtype},{config}]"


def jobs(entry: Entry, dtypes: tuple[str, ...] = ()) -> Iterator[Job]:
    """Every kernel × every row × every variant × each dtype × each target the row is for (``"any"``: all of them)."""
    for row in entry.configs.rows:
        for arch in TARGETS if row.arch == "any" else (row.arch,):
            for dtype in (row.dtype,) if row.dtype else dtypes or entry.dtypes:
                for variant in entry.kernels[row.kernel].variants:
                    yield Job(entry, row, variant, dtype, arch)


def compile_job(job: Job) -> Any:
    """Compile; returns Triton's compiled kernel, whose ``metadata.shared`` is the shared memory it needs in bytes.

    Pointers count as 16-byte aligned, as PyTorch's allocations are, and integers of type ``"i32:16"`` as divisible by
    16, as the JIT specialises a launch: only so does it load wide and pipeline through shared memory.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = job.entry.kernels[job.row.kernel]
    target = TARGETS[job.arch]
    function = job.entry.load(*kernel.function.split(":"))
    options = {key: value for key, value in job.row.config.items() if key in _OPTIONS}
    constants = {key: value for key, value in job.row.config.items() if key not in _OPTIONS} | dict(job.variant)
    signature = {
        name: kind.format(dtype=_TRITON_DTYPES.get(job.dtype, job.dtype)) for name, kind in kernel.signature.items()
    }
    aligned = {
        (function.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind[0] == "*" or kind.endswith(":16")
    }
    signature = {name: kind.removesuffix(":16") for name, kind in signature.items()}
    source = ASTSource(function, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    return triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp_size), options=options)
