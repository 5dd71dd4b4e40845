"""Compiling kernels ahead of time, on a machine that needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .configs import Row
from .device import TARGETS, DeviceFacts

if TYPE_CHECKING:
    from fusedops.catalog import Entry

_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "waves_per_eu", "matrix_instr_nonkdim")
_TRITON_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Job:
    """One compilation: a kernel in one variant, with one row's config, for one dtype and target."""

    entry: Entry
    row: Row
    variant: Mapping[str, Any]
    dtype: str
    arch: str

    @property
    def constants(self) -> dict[str, Any]:
        """The variant, with the number of the row's bucket for a value such as ``"{head_dim}"``."""
        return {
            key: self.row.bucket[value[1:-1]] if isinstance(value, str) and value[0] == "{" else value
            for key, value in self.variant.items()
        }

    def __str__(self) -> str:
        config = ",".join(f"{k}={v}" for k, v in {**self.row.bucket, **self.row.config, **self.constants}.items())
        return f"{self.row.kernel}[{self.arch},{self.dtype},{config}]"


def jobs(entry: Entry, dtypes: tuple[str, ...] = ()) -> Iterator[Job]:
    """Each target's rows, those that a lookup on that target finds: every such row × every variant × each dtype."""
    for arch, target in TARGETS.items():
        device = DeviceFacts(arch, arch, 0, target.shared_memory)
        for row in entry.configs.rows:
            if target.backend not in entry.kernels[row.kernel].backends:
                continue
            for dtype in dtypes or entry.dtypes:
                if (
                    row.dtype_rank(dtype) is not None
                    and entry.configs.row(row.kernel, device, dtype, **row.bucket) is row
                ):
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
    constants = {key: value for key, value in job.row.config.items() if key in function.arg_names} | job.constants
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
