"""Softmax: exp(x) / Σ exp(x), and its logarithm."""

from typing import Any

from fusedops.catalog import Array, Draw, Entry, Kernel, Operator, Sample

from .reference import (
    log_softmax,
    log_softmax_backward,
    log_softmax_smooth,
    softmax,
    softmax_backward,
    softmax_smooth,
)


def _sample(draw: Draw) -> Sample:
    shape = tuple(draw.integer(1, 6) for _ in range(draw.integer(0, 4)))
    dim = draw.choice([len(shape), draw.integer(0, len(shape))])
    shape = (*shape[:dim], draw.integer(0, 300), *shape[dim:])
    last = dim == len(shape) - 1
    return {
        "input": Array(shape, scale=draw.choice([1e-3, 1.0, 30.0]), grad=True),
        "dim": draw.choice([dim, dim - len(shape)]),
        "scale": draw.choice([1.0, 0.125, -1.0]),
        "mask": _mask(draw, shape, dim),
        "causal": draw.choice([False, True]) if last and len(shape) > 1 else False,
    }


def _mask(draw: Draw, shape: tuple[int, ...], dim: int) -> Array | None:
    kind = draw.choice([None, "bool", "floating", "differentiable"])
    if kind is None:
        return None
    sizes = tuple(draw.choice([1, size]) for size in shape)
    if kind == "differentiable":  # what is the same along dim changes nothing: its gradient is 0, less the rounding
        sizes = (*sizes[:dim], shape[dim], *sizes[dim + 1 :])
    sizes = sizes[draw.integer(0, dim if kind == "differentiable" else len(shape)) :]
    if kind == "bool":
        return Array(sizes, dtype="bool", values="bits", strided=False)
    return Array(sizes, grad=kind == "differentiable")


_SHAPES = {
    f"{rows} x {width}": {"input": Array((rows, width), grad=True)}
    for rows, width in [(32768, 1024), (32768, 4096), (16384, 8192), (8192, 32768), (4096, 131072)]
}

_FORWARD = {
    "x_ptr": "*{dtype}",
    "mask_ptr": "*i1",
    "y_ptr": "*{dtype}",
    "rows": "i32",
    "width": "i32:16",
    "stride_x": "i32:16",
}
_BACKWARD = {
    "dy_ptr": "*{dtype}",
    "y_ptr": "*{dtype}",
    "mask_ptr": "*i1",
    "dx_ptr": "*{dtype}",
    "rows": "i32",
    "width": "i32:16",
    "stride_dy": "i32:16",
    "stride_y": "i32:16",
}
_SCALARS = {
    "queries": "i32",
    "mask_size_1": "i32",
    "mask_size_2": "i32",
    "mask_stride_0": "i32:16",
    "mask_stride_1": "i32:16",
    "mask_stride_2": "i32:16",
    "scale": "fp32",
}


def _variants(key: str, plain: int, masked: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        {"mask_ptr": None, "LOG": False, "CAUSAL": False, "MASK_COLUMNS": False, key: plain},
        {"LOG": True, "CAUSAL": True, "MASK_COLUMNS": True, key: masked},
    )


ENTRY = Entry(
    name="softmax",
    summary="Softmax and log-softmax along a dimension, of scaled and masked scores",
    source="Milakov & Gimelshein, Online normalizer calculation for softmax (2018), algorithm 3, for wide rows",
    dtypes=("float32", "bfloat16", "float16"),
    limits="any width, any number of rows, any dimension, any strides; a mask is broadcast over up to three dimensions",
    operators=(
        Operator(
            name="softmax",
            reference=softmax,
            backward=softmax_backward,
            smooth=softmax_smooth,
            eager="softmax_eager",
            sample=_sample,
            scores=("input", "mask"),
            registers=("softmax", "softmax_backward"),
            shapes=_SHAPES,
        ),
        Operator(
            name="log_softmax",
            reference=log_softmax,
            backward=log_softmax_backward,
            smooth=log_softmax_smooth,
            eager="log_softmax_eager",
            sample=_sample,
            scores=("input", "mask"),
            registers=("softmax", "softmax_backward"),
            shapes=_SHAPES,
        ),
    ),
    kernels={
        "softmax_forward": Kernel(
            "kernel:softmax_forward", {**_FORWARD, **_SCALARS}, _variants("ONE_TILE", True, False)
        ),
        "softmax_forward_split": Kernel(
            "kernel:softmax_forward_split",
            {**_FORWARD, "slots_ptr": "*i64", "chunk": "i32:16", "splits": "i32", **_SCALARS},
            _variants("SPLITS", 8, 16),
            backends=("cuda",),
        ),
        "softmax_backward": Kernel(
            "backward:softmax_backward", {**_BACKWARD, **_SCALARS}, _variants("ONE_TILE", True, False)
        ),
        "softmax_backward_split": Kernel(
            "backward:softmax_backward_split",
            {**_BACKWARD, "slots_ptr": "*i64", "chunk": "i32:16", "splits": "i32", **_SCALARS},
            _variants("SPLITS", 8, 16),
            backends=("cuda",),
        ),
    },
)
