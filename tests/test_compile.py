"""Every kernel × every row of its config table compiles for every target, within the target's shared memory."""

from __future__ import annotations

import pytest

from fusedops import catalog, runtime

pytest.importorskip("triton")
if runtime.interpreting():
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from fusedops.runtime import aot

KERNELS = [
    pytest.param(entry, kernel, arch, id=f"{kernel}-{arch}")
    for entry in catalog.entries()
    for kernel, description in entry.kernels.items()
    for arch, target in runtime.TARGETS.items()
    if target.backend in description.backends
]


@pytest.mark.parametrize(("entry", "kernel", "arch"), KERNELS)
def test_every_row_compiles_within_the_resources(entry, kernel, arch):
    # Two dtypes are enough here: bfloat16 and float16 differ in no resource.
    dtypes = tuple(dtype for dtype in entry.dtypes if dtype != "float16")
    jobs = [job for job in aot.jobs(entry, dtypes) if job.row.kernel == kernel and job.arch == arch]
    assert jobs
    for job in jobs:
        shared = aot.compile_job(job).metadata.shared
        assert shared <= job.row.shared, f"{job} needs {shared} bytes, its row says {job.row.shared}"
        assert job.row.shared <= runtime.TARGETS[arch].shared_memory, str(job)
