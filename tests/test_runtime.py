"""The runtime that every kernel shares: registration, config tables, dispatch."""

from __future__ import annotations

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedops import runtime

ANY_GPU = runtime.DeviceFacts("sm_90", "a GPU", 132, 232_448)


@pytest.fixture(scope="module")
def doubled():
    """An operator whose implementation and fake version can be told apart from the dispatcher's doings."""
    calls = []

    def implementation(input):
        calls.append(input)
        return input * 2

    call = runtime.register(
        "test_doubled(Tensor input) -> Tensor",
        implementation,
        torch.empty_like,
        setup_context=lambda ctx, inputs, output: None,
        backward=lambda ctx, grad: grad * 2,
    )
    return call, calls


def test_plain_tensors_and_gradients(doubled):
    call, _ = doubled
    x = torch.randn(3, requires_grad=True)
    assert torch.equal(call(x.detach()), 2 * x)
    call(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    with torch.no_grad():
        assert not call(x).requires_grad


def test_fake_tensors_do_not_reach_the_implementation(doubled):
    call, calls = doubled
    calls.clear()
    with FakeTensorMode():
        assert call(torch.empty(3)).shape == (3,)
    assert not calls


def test_forward_mode_gradients_are_refused_rather_than_lost(doubled):
    call, _ = doubled
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="test_doubled"):
        call(torch.autograd.forward_ad.make_dual(torch.ones(3), torch.ones(3)))


def test_vmap_runs_the_operator_a_slice_at_a_time(doubled):
    call, _ = doubled
    x = torch.randn(4, 3)
    assert torch.equal(torch.vmap(call)(x), 2 * x)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_autocast_does_not_reach_into_an_implementation(requires_grad):
    call = runtime.register(
        f"test_product_{requires_grad}(Tensor input) -> Tensor",
        lambda input: input @ input,
        torch.empty_like,
        setup_context=lambda ctx, inputs, output: None,
        backward=lambda ctx, grad: grad,
    )
    x = torch.randn(4, 4, requires_grad=requires_grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        inside = call(x)
    assert torch.equal(inside, x @ x)


def table(tmp_path, *rows):
    path = tmp_path / "configs.json"
    path.write_text(json.dumps({"rows": [{"kernel": "k", "arch": "any", **row} for row in rows]}))
    return runtime.ConfigTable(path)


def test_lookup_takes_the_nearest_bucket(tmp_path):
    rows = table(tmp_path, *({"bucket": {"width": w}, "config": {"B": w}} for w in (128, 1024, 8192)))
    assert rows.lookup("k", ANY_GPU, "float32", width=1024) == {"B": 1024}
    assert rows.lookup("k", ANY_GPU, "float32", width=2000) == {"B": 1024}
    assert rows.lookup("k", ANY_GPU, "float32", width=1) == {"B": 128}
    assert rows.lookup("k", ANY_GPU, "float32", width=10**6) == {"B": 8192}


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("sm_90", "90"),
        ("sm_86", "80"),
        ("sm_103", "90"),
        ("sm_75", "any"),
        ("gfx942", "any"),
        ("gfx950", "950"),
        ("x", "any"),
    ],
)
def test_lookup_takes_the_architecture_or_an_older_one_of_its_family(tmp_path, arch, expected):
    archs = {"sm_80": "80", "sm_90": "90", "gfx950": "950", "any": "any"}
    rows = table(tmp_path, *({"arch": a, "config": {"B": b}} for a, b in archs.items()))
    assert rows.lookup("k", runtime.DeviceFacts(arch, "", 1, 10**6), "float32") == {"B": expected}


def test_lookup_passes_over_what_the_device_has_no_shared_memory_for(tmp_path):
    rows = table(tmp_path, {"arch": "sm_80", "config": {"B": 2}, "shared": 160_000}, {"config": {"B": 1}})
    assert rows.lookup("k", runtime.DeviceFacts("sm_86", "", 1, 101_376), "float32") == {"B": 1}


def test_lookup_prefers_a_row_of_the_dtype(tmp_path):
    rows = table(tmp_path, {"config": {"B": 1}}, {"config": {"B": 2}, "dtype": "float16"})
    assert rows.lookup("k", ANY_GPU, "float16") == {"B": 2}
    assert rows.lookup("k", ANY_GPU, "float32") == {"B": 1}


def test_sixteen_bit_dtypes_stand_in_for_each_other(tmp_path):
    rows = table(tmp_path, {"config": {"B": 1}}, {"config": {"B": 2}, "dtype": "bfloat16"})
    assert rows.lookup("k", ANY_GPU, "float16") == {"B": 2}
    assert rows.lookup("k", ANY_GPU, "float32") == {"B": 1}


def test_lookup_without_a_row_says_what_is_missing(tmp_path):
    with pytest.raises(LookupError, match="no row for kernel 'other'"):
        table(tmp_path, {"config": {}}).lookup("other", ANY_GPU, "float32")


def test_trial_config_goes_before_the_rows_and_ends(tmp_path):
    rows = table(tmp_path, {"config": {"B": 1}})
    with rows.trial("k", {"B": 7}) as bucket:
        assert rows.lookup("k", ANY_GPU, "float32", width=3) == {"B": 7}
    assert bucket == {"width": 3}
    assert rows.lookup("k", ANY_GPU, "float32", width=3) == {"B": 1}


def test_a_looked_up_config_can_be_changed_without_harm(tmp_path):
    rows = table(tmp_path, {"config": {"B": 1}})
    rows.lookup("k", ANY_GPU, "float32")["B"] = 2
    assert rows.lookup("k", ANY_GPU, "float32") == {"B": 1}


def test_strict_raises_where_a_kernel_does_not_cover_the_call(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    assert runtime.use_kernel("op", torch.device("cpu"))
    assert not runtime.use_kernel("op", torch.device("cpu"), "dtype int8")
    with runtime.strict(), pytest.raises(RuntimeError, match="op has no kernel for this call: dtype int8"):
        runtime.use_kernel("op", torch.device("cpu"), "dtype int8")
