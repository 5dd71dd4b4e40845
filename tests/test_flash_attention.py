"""What is special about flash_attention: masks, groups of heads, head dims, layouts, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fusedops import runtime
from fusedops.catalog import check
from fusedops.catalog.flash_attention import ENTRY, op, reference
from fusedops.catalog.flash_attention.op import flash_attention

INTERPRETED = runtime.interpreting() and not torch.cuda.is_available()
NARROW = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter multiplies bfloat16 wrongly
NAN = float("nan")


def draw(*shape, dtype=torch.float32, device="cpu", seed=0, grad=True):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(grad)


def inputs(device, heads=(2, 2), seqs=(40, 40), dims=(16, 16), dtype=torch.float32, batch=1):
    q = draw(batch, heads[0], seqs[0], dims[0], dtype=dtype, device=device)
    k = draw(batch, heads[1], seqs[1], dims[0], dtype=dtype, device=device, seed=1)
    return q, k, draw(batch, heads[1], seqs[1], dims[1], dtype=dtype, device=device, seed=2)


def judge(query, key, value, least=0.0, **options):
    """Output and gradients within the tolerance of the float64 reference, or within ``least``."""
    operator = ENTRY.operators[0]
    arguments = {"query": query, "key": key, "value": value, **options}
    for judged in check.judge(ENTRY, operator, arguments, seed=0):
        assert judged.passed or judged.error <= least, judged


@pytest.mark.usefixtures("poisoned", "no_fallback")
@pytest.mark.parametrize("seqs", [(50, 20), (20, 50), (1, 33), (33, 1), (33, 0), (0, 33)])
@pytest.mark.parametrize("alignment", op.ALIGNMENTS)
def test_causal_of_different_lengths(device, seqs, alignment):
    q, k, v = inputs(device, seqs=seqs)
    judge(q, k, v, causal=True, causal_alignment=alignment)


@pytest.mark.parametrize(
    ("alignment", "seen"),
    [("top_left", ["1....", "11...", "111.."]), ("bottom_right", ["111..", "1111.", "11111"])],
)
def test_the_alignment_is_the_one_that_the_docstring_draws(device, alignment, seen):
    q, k = torch.zeros(1, 1, 3, 16, device=device), torch.zeros(1, 1, 5, 16, device=device)
    v = F.pad(torch.eye(5, device=device), (0, 11))[None, None]  # the output is the row of probabilities
    probabilities = flash_attention(q, k, v, causal=True, causal_alignment=alignment)[0, 0, :, :5]
    assert ["".join("1" if p > 0 else "." for p in row) for row in probabilities.tolist()] == seen


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
def test_a_query_that_sees_no_key(device, dtype):
    q, k, v = inputs(device, heads=(4, 2), seqs=(70, 20), dtype=dtype)
    out, lse = torch.ops.fusedops.flash_attention(q, k, v, 0.25, True, "bottom_right")
    assert not out[:, :, :50].any()
    assert torch.equal(lse[:, :, :50], torch.full_like(lse[:, :, :50], -float("inf")))
    assert lse[:, :, 50:].isfinite().all()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert not dq[:, :, :50].any()
    assert dk.isfinite().all()
    assert dv.isfinite().all()
    judge(q, k, v, causal=True, causal_alignment="bottom_right")


@pytest.mark.parametrize("causal", [False, True])
def test_lse_is_the_logarithm_of_the_sum_of_exponentials(device, causal):
    q, k, v = inputs(device, heads=(4, 2), seqs=(37, 70))
    _, lse = torch.ops.fusedops.flash_attention(q, k, v, 0.3, causal, "bottom_right")
    _, expected = reference.softmax(check.to_numpy(q), check.to_numpy(k), 0.3, causal, "bottom_right")
    np.testing.assert_allclose(check.to_numpy(lse), expected, rtol=1e-6, atol=1e-6)
    assert not lse.requires_grad, "no gradient flows through lse, and none is pretended"


def test_grouped_heads_are_repeated_heads(device):
    q, k, v = inputs(device, heads=(6, 2), seqs=(20, 33))
    grad = draw(1, 6, 20, 16, device=device, grad=False)
    grouped = torch.autograd.grad(flash_attention(q, k, v), (q, k, v), grad)
    repeated = flash_attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1))
    for ours, theirs in zip(grouped, torch.autograd.grad(repeated, (q, k, v), grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("poisoned", "no_fallback")
@pytest.mark.parametrize("dims", [(24, 24), (80, 40), (1, 3), (17, 130), (256, 256)])
def test_head_dims_leave_the_neighbour_alone(device, dims):
    """Each head lies between others that are NaN, and so does the gradient."""
    seq, (head_dim, head_dim_v) = 20, dims

    def between_nans(tensor):
        padded = torch.full((*tensor.shape[:2], seq + 2, 3, tensor.shape[3]), NAN, device=device)
        padded[:, :, 1:-1, 1] = tensor.detach()
        return padded[:, :, 1:-1, 1].requires_grad_()

    q, k, v = (between_nans(tensor) for tensor in inputs(device, seqs=(seq, seq), dims=dims))
    assert q.stride(2) == 3 * head_dim
    judge(q, k, v, causal=True)
    grad = between_nans(draw(1, 2, seq, head_dim_v, device=device)).detach()
    expected = torch.autograd.grad(flash_attention(q, k, v), (q, k, v), grad.contiguous())
    for ours, theirs in zip(torch.autograd.grad(flash_attention(q, k, v), (q, k, v), grad), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_slices_of_a_fused_projection_are_read_in_place(device, monkeypatch):
    qkv = draw(2, 33, 3, 2, 16, device=device)  # [batch, seq, qkv, heads, head_dim]
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))

    def refuse(*_args, **_kwargs):
        raise AssertionError("a view was copied")

    expected = flash_attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    if runtime.use_kernel("flash_attention", q.device):
        monkeypatch.setattr(torch.Tensor, "contiguous", refuse)
    out = flash_attention(q, k, v, causal=True)
    assert torch.equal(out, expected)
    torch.autograd.grad(out, qkv, torch.ones_like(out), retain_graph=True)
    monkeypatch.undo()
    out.sum().backward()  # an expanded gradient
    values = [check.to_numpy(tensor) for tensor in (q, k, v)]
    gradients = reference.flash_attention_backward(np.ones(out.shape), *values, causal=True)
    for i, name in enumerate(("query", "key", "value")):
        np.testing.assert_allclose(
            check.to_numpy(qkv.grad[:, :, i].transpose(1, 2)), gradients[name], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
def test_large_scores(device, dtype):
    q, k, v = inputs(device, heads=(4, 2), seqs=(50, 50), dims=(32, 32), dtype=dtype)
    # P is recomputed from scores of several hundred, each rounded to float32: 2^-24 of that is 2e-5.
    judge((q * 100).detach().requires_grad_(), k, v, least=2e-5, causal=True)


def test_gradcheck_in_float64():
    q, k, v = (tensor.double().detach().requires_grad_() for tensor in inputs("cpu", (4, 2), (5, 7), (3, 2)))
    for alignment in op.ALIGNMENTS:
        assert torch.autograd.gradcheck(lambda *qkv, a=alignment: flash_attention(*qkv, None, True, a), (q, k, v))
    assert torch.autograd.gradcheck(flash_attention, (q, k, v))


def test_frozen_keys_and_values_get_no_gradient(device):
    q, k, v = inputs(device, seqs=(20, 30))
    expected = torch.autograd.grad(flash_attention(q, k, v).sum(), q)[0]
    out = flash_attention(q, k.detach(), v.detach())
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], expected)


def test_autocast_casts_the_inputs(device):
    q, k, v = inputs(device, seqs=(20, 20))
    with torch.autocast(device, dtype=NARROW):
        out = flash_attention(q, k.to(NARROW), v)
        assert out.dtype == F.scaled_dot_product_attention(q, k, v).dtype == NARROW
    assert torch.equal(out, flash_attention(q.to(NARROW), k.to(NARROW), v.to(NARROW)))


def test_what_the_kernel_does_not_cover_is_pytorchs(device):
    q, k, v = inputs(device, seqs=(9, 9), dims=(264, 16))
    judge(q, k, v, causal=True)
    assert "up to 256" in op._unsupported(q, v, 1.0)
    q, k, v = inputs(device, seqs=(9, 9))
    judge(q, k, v, softmax_scale=-0.5)
    judge(q, k, v, softmax_scale=0.0)


def test_float32_follows_the_matmul_precision():
    before = torch.get_float32_matmul_precision()
    try:
        for precision, expected in (("high", "tf32"), ("medium", "tf32"), ("highest", "ieee")):
            torch.set_float32_matmul_precision(precision)
            assert op._input_precision(torch.float32, "sm_90") == expected
            assert op._input_precision(torch.float32, "gfx950") == "ieee", "it has no TF32"
            assert op._input_precision(torch.bfloat16, "sm_90") == "ieee", "the narrow dtypes share one binary"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kernel", ENTRY.kernels)
def test_no_target_runs_a_head_on_a_row_made_for_a_smaller_one(kernel):
    for arch, target in runtime.TARGETS.items():
        device = runtime.DeviceFacts(arch, arch, 1, target.shared_memory)
        for dtype in ENTRY.dtypes:
            for head_dim in (16, 32, 64, 128, 256):
                row = ENTRY.configs.row(kernel, device, dtype, head_dim=head_dim)
                assert row.bucket["head_dim"] >= head_dim, (arch, dtype, head_dim)


def test_refusals(device):
    q, k, v = inputs(device, heads=(4, 2), seqs=(5, 7))
    for error, message, arguments in [
        (
            ValueError,
            r"query's heads must be a multiple of key's, got 4 and 3",
            (q, *inputs(device, (3, 3), (5, 7))[1:]),
        ),
        (ValueError, r"query must be \[batch, heads, seq, head_dim\], got \[4, 5, 16\]", (q[0], k, v)),
        (ValueError, r"key has batch 2, query 1", (q, torch.cat([k, k]), v)),
        (ValueError, r"same head_dim, at least 1, got 16 and 8", (q, k[..., :8], v)),
        (ValueError, r"at least 1, got 0 and 0", (q[..., :0], k[..., :0], v)),
        (ValueError, r"value must have key's heads and length \[2, 7\], got \[2, 6\]", (q, k, v[:, :, :6])),
        (ValueError, r"value is on meta, query on ", (q, k, v.to("meta"))),
        (TypeError, r"key has dtype torch.float16, query torch.float32; cast to one", (q, k.half(), v)),
        (TypeError, r"query must have a floating-point dtype, got torch.int64", (q.long(), k, v)),
    ]:
        with pytest.raises(error, match=message):
            flash_attention(*arguments)
    with pytest.raises(ValueError, match=r"causal_alignment must be one of .*top_left.*, got 'left'"):
        flash_attention(q, k, v, causal=True, causal_alignment="left")


@pytest.mark.skipif(runtime.interpreting(), reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("kernel", ENTRY.kernels)
def test_tf32_needs_no_more_shared_memory_than_the_row_says(kernel):
    aot = pytest.importorskip("fusedops.runtime.aot")
    pytest.importorskip("triton")
    for job in aot.jobs(ENTRY, ("float32",)):
        if job.row.kernel == kernel and job.arch == "sm_90":
            tf32 = aot.Job(job.entry, job.row, {**job.variant, "INPUT_PRECISION": "tf32"}, job.dtype, job.arch)
            assert aot.compile_job(tf32).metadata.shared <= job.row.shared, str(tf32)
