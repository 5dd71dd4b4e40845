"""What every test shares: the device under test, and an import path without the repository's root.

Under ``TRITON_INTERPRET=1`` the same tests run the Triton kernels on the CPU, and on a machine with a GPU they run
them there.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Older transformers import a folder `kernels` at the root as if it were Hugging Face's package of that name.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != ROOT]

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from fusedops import runtime  # noqa: E402

settings.register_profile(
    "fusedops", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
settings.load_profile("fusedops")


@pytest.fixture(scope="session")
def device() -> str:
    """The device whose implementation the tests judge."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def poisoned():
    """``torch.empty`` gives NaN (and the largest integers), so that what a kernel fails to write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def no_fallback():
    """A kernel that does not cover a call is an error."""
    with runtime.strict():
        yield


@pytest.fixture
def comparable_float8(monkeypatch):
    """``torch.allclose``, by which opcheck looks for changed inputs, knows no float8: theirs are compared by bytes."""
    allclose = torch.allclose

    def by_bytes(a, b, *args, **kwargs):
        if a.is_floating_point() and a.dtype.itemsize == 1:
            return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return allclose(a, b, *args, **kwargs)

    monkeypatch.setattr(torch, "allclose", by_bytes)
