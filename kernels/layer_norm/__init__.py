"""LayerNorm: y = (x − mean(x)) / sqrt(var(x) + eps) · w + b."""

from fusedops.catalog import Array, Draw, Entry, Kernel, Operator, Sample

from .reference import layer_norm, layer_norm_backward


def _sample(draw: Draw) -> Sample:
    # Of 2 to 4 values the gradient is mostly cancellation; tests/test_layer_norm.py judges those by its parts.
    width = draw.choice([1, draw.integer(5, 64), draw.integer(5, 300)])
    lead = tuple(draw.integer(0, 5) for _ in range(draw.integer(0, 3)))
    return {
        "input": Array((*lead, width), scale=draw.choice([1e-3, 1.0, 30.0]), offset=draw.choice([0.0, 3.0]), grad=True),
        "weight": Array((width,), offset=draw.choice([0.0, 1.0]), grad=True) if draw.integer(0, 3) else None,
        "bias": Array((width,), grad=True) if draw.integer(0, 2) else None,
        "eps": draw.choice([1e-6, 1e-5]),
    }


ENTRY = Entry(
    name="layer_norm",
    summary="Normalisation of the last dimension to mean 0 and variance 1",
    source="Ba, Kiros & Hinton, Layer Normalization (2016), equation 4",
    dtypes=("float32", "bfloat16", "float16"),
    limits="any width, any number of rows, any strides; weight and bias in any floating dtype, each optional",
    operators=(
        Operator(
            name="layer_norm",
            reference=layer_norm,
            backward=layer_norm_backward,
            eager="layer_norm_eager",
            sample=_sample,
            registers=("layer_norm", "layer_norm_backward"),
            shapes={
                f"{rows} x {width}": {
                    "input": Array((rows, width), grad=True),
                    "weight": Array((width,), grad=True),
                    "bias": Array((width,), grad=True),
                }
                for rows, width in [(32768, 1024), (32768, 4096), (16384, 8192), (8192, 32768), (4096, 131072)]
            },
        ),
    ),
    kernels={
        "layer_norm_forward": Kernel(
            "kernel:layer_norm_forward",
            {
                "x_ptr": "*{dtype}",
                "w_ptr": "*{dtype}",
                "b_ptr": "*{dtype}",
                "y_ptr": "*{dtype}",
                "mean_ptr": "*fp64",
                "rstd_ptr": "*fp32",
                "rows": "i32",
                "width": "i32:16",
                "stride_x": "i32:16",
                "eps": "fp32",
            },
            tuple({"HAS_WEIGHT": True, "HAS_BIAS": True, "ONE_TILE": one} for one in (True, False)),
        ),
        "layer_norm_backward": Kernel(
            "kernel:layer_norm_backward",
            {
                "dy_ptr": "*{dtype}",
                "x_ptr": "*{dtype}",
                "w_ptr": "*{dtype}",
                "mean_ptr": "*fp64",
                "rstd_ptr": "*fp32",
                "dx_ptr": "*{dtype}",
                "dw_ptr": "*fp32",
                "db_ptr": "*fp32",
                "rows": "i32",
                "width": "i32:16",
                "stride_dy": "i32:16",
                "stride_x": "i32:16",
            },
            tuple(
                {"HAS_WEIGHT": True, "WEIGHT_GRAD": True, "BIAS_GRAD": True, "ONE_TILE": one} for one in (True, False)
            ),
        ),
    },
)
