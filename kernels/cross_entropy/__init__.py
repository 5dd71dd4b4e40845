"""Cross-entropy, alone and with the linear layer before it, forward and backward in one pass."""

from fusedops.catalog import Array, Draw, Entry, Kernel, Operator, Sample

from .reference import (
    cross_entropy,
    cross_entropy_backward,
    fused_linear_cross_entropy,
    fused_linear_cross_entropy_backward,
)


def _target(shape: tuple[int, ...], classes: int, dtype: str = "int64") -> Array:
    return Array(shape, dtype=dtype, values="index", scale=classes)


def _options(draw: Draw, reductions: tuple[str, ...]) -> Sample:
    reduction = draw.choice(reductions)
    return {
        # Where class 0 is ignored all tokens may be, and a mean of none has no derivative to compare with.
        "ignore_index": -100 if reduction == "mean" else draw.choice([-100, 0]),
        "label_smoothing": draw.choice([0.0, 0.1, 1.0]),
        "z_loss": draw.choice([0.0, 1e-2]),
        "reduction": reduction,
    }


def _sample(draw: Draw) -> Sample:
    classes = draw.integer(1, 300)
    lead = tuple(draw.integer(1, 5) for _ in range(draw.integer(0, 3)))
    return {
        "input": Array((*lead, classes), scale=draw.choice([1.0, 10.0]), grad=True),
        "target": _target(lead, classes, draw.choice(["int64", "int32"])),
        **_options(draw, ("mean", "sum", "none")),
    }


def _linear_sample(draw: Draw) -> Sample:
    classes, hidden = draw.integer(2, 70), draw.integer(1, 40)
    lead = tuple(draw.integer(1, 5) for _ in range(draw.integer(1, 2)))
    return {
        "input": Array((*lead, hidden), grad=True),
        "weight": Array((classes, hidden), scale=hidden**-0.5, grad=True),
        "target": _target(lead, classes),
        "bias": Array((classes,), grad=True) if draw.integer(0, 1) else None,
        **_options(draw, ("mean", "sum")),
        "chunk_tokens": draw.choice([None, 1, 3]),
    }


_ROWS = {"target_ptr": "*i64", "upstream_ptr": "*{dtype}", "count_ptr": "*fp32"}

ENTRY = Entry(
    name="cross_entropy",
    summary="Cross-entropy loss, alone and with the linear layer before it",
    source="Hsu et al., Liger Kernel (2024), section 3.2; Milakov & Gimelshein, online softmax (2018), algorithm 3",
    dtypes=("float32", "bfloat16", "float16"),
    limits="any number of classes and tokens, any strides; targets int64 or int32",
    operators=(
        Operator(
            name="cross_entropy",
            reference=cross_entropy,
            backward=cross_entropy_backward,
            eager="cross_entropy_eager",
            sample=_sample,
            scores=("input",),
            registers=("cross_entropy", "cross_entropy_backward"),
            shapes={
                f"{tokens} x {classes}": {
                    "input": Array((tokens, classes), grad=True),
                    "target": _target((tokens,), classes),
                }
                for tokens, classes in [(16384, 32000), (8192, 50257), (8192, 128256), (4096, 262144)]
            },
        ),
        Operator(
            name="fused_linear_cross_entropy",
            reference=fused_linear_cross_entropy,
            backward=fused_linear_cross_entropy_backward,
            eager="fused_linear_cross_entropy_eager",
            sample=_linear_sample,
            registers=("fused_linear_cross_entropy", "fused_linear_cross_entropy_scale_backward"),
            shapes={
                f"{tokens} x {hidden} x {classes}": {
                    "input": Array((tokens, hidden), grad=True),
                    "weight": Array((classes, hidden), scale=hidden**-0.5, grad=True),
                    "target": _target((tokens,), classes),
                }
                for tokens, hidden, classes in [(16384, 2048, 32000), (8192, 4096, 128256)]
            },
        ),
    ),
    kernels={
        "cross_entropy_forward": Kernel(
            "kernel:cross_entropy_forward",
            {"x_ptr": "*{dtype}", **_ROWS, "loss_ptr": "*fp32", "dx_ptr": "*{dtype}"}
            | {"rows": "i32", "classes": "i32:16", "stride_x": "i32:16", "ignore_index": "i32"}
            | {"smoothing": "fp32", "z_loss": "fp32"},
            (
                {"upstream_ptr": None, "SMOOTH": False, "ONE_TILE": True},
                {"upstream_ptr": None, "SMOOTH": False, "ONE_TILE": False},
                {"count_ptr": None, "SMOOTH": True, "ONE_TILE": False},
            ),
        ),
        "cross_entropy_backward": Kernel(
            "kernel:cross_entropy_backward",
            {"dlogits_ptr": "*{dtype}", **_ROWS, "out_ptr": "*{dtype}"}
            | {"rows": "i32", "classes": "i32:16", "stride_upstream": "i32", "ignore_index": "i32"},
            ({"count_ptr": None, "IN_PLACE": True}, {"IN_PLACE": False}),
        ),
        "cross_entropy_count": Kernel(
            "kernel:cross_entropy_count",
            {"target_ptr": "*i64", "count_ptr": "*fp32", "rows": "i32", "ignore_index": "i32"},
        ),
        "cross_entropy_total": Kernel(
            "kernel:cross_entropy_total",
            {"loss_ptr": "*fp32", "count_ptr": "*fp32", "out_ptr": "*{dtype}", "rows": "i32"},
        ),
    },
)
