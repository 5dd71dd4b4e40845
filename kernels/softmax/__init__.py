"""Softmax: exp(x) / Σ exp(x), and its logarithm."""

from fusedops.catalog import Array, Draw, Entry, Kernel, Operator, Sample

from .reference import log_softmax, log_softmax_backward, softmax, softmax_backward


def _sample(draw: Draw) -> Sample:
    shape = tuple(draw.integer(1, 6) for _ in range(draw.integer(0, 2)))
    dim = draw.integer(0, len(shape))
    shape = (*shape[:dim], draw.integer(0, 300), *shape[dim:])
    return {
        "input": Array(shape, scale=draw.choice([1e-3, 1.0, 30.0]), grad=True),
        "dim": draw.choice([dim, dim - len(shape)]),
    }


_SHAPES = {
    f"{rows} x {width}": {"input": Array((rows, width), grad=True)}
    for rows, width in [(32768, 1024), (32768, 4096), (16384, 8192), (8192, 32768), (4096, 131072)]
}

ENTRY = Entry(
    name="softmax",
    summary="Softmax and log-softmax along a dimension",
    source="Milakov & Gimelshein, Online normalizer calculation for softmax (2018), algorithm 3, for wide rows",
    dtypes=("float32", "bfloat16", "float16"),
    limits="any width, any number of rows, any dimension, any strides",
    operators=(
        Operator(
            name="softmax",
            reference=softmax,
            backward=softmax_backward,
            eager="softmax_eager",
            sample=_sample,
            scores=("input",),
            registers=("softmax", "softmax_backward"),
            shapes=_SHAPES,
        ),
        Operator(
            name="log_softmax",
            reference=log_softmax,
            backward=log_softmax_backward,
            eager="log_softmax_eager",
            sample=_sample,
            scores=("input",),
            registers=("softmax", "softmax_backward"),
            shapes=_SHAPES,
        ),
    ),
    kernels={
        "softmax_forward": Kernel(
            "kernel:softmax_forward",
            {
                "x_ptr": "*{dtype}",
                "y_ptr": "*{dtype}",
                "rows": "i32",
                "width": "i32:16",
                "stride_x": "i32:16",
            },
            ({"LOG": False, "ONE_TILE": True}, {"LOG": True, "ONE_TILE": False}),
        ),
        "softmax_backward": Kernel(
            "kernel:softmax_backward",
            {
                "dy_ptr": "*{dtype}",
                "y_ptr": "*{dtype}",
                "dx_ptr": "*{dtype}",
                "rows": "i32",
                "width": "i32:16",
                "stride_dy": "i32:16",
                "stride_y": "i32:16",
            },
            ({"LOG": False, "ONE_TILE": True}, {"LOG": True, "ONE_TILE": False}),
        ),
    },
)
