"""RMSNorm: y = x / sqrt(mean(x²) + eps) · w."""

from fusedops.catalog import Array, Draw, Entry, Kernel, Operator, Sample

from .reference import rms_norm, rms_norm_backward


def _sample(draw: Draw) -> Sample:
    width = draw.integer(1, 300)
    lead = tuple(draw.integer(0, 5) for _ in range(draw.integer(0, 3)))
    return {
        "input": Array((*lead, width), scale=draw.choice([1e-3, 1.0, 30.0]), grad=True),
        "weight": Array((width,), offset=draw.choice([0.0, 1.0]), grad=True) if draw.integer(0, 3) else None,
        "eps": draw.choice([1e-6, 1e-5]),
        "weight_offset": draw.choice([0.0, 1.0]),
        "cast_before_weight": draw.choice([False, True]),
    }


ENTRY = Entry(
    name="rms_norm",
    summary="Root-mean-square normalisation of the last dimension",
    source="Zhang & Sennrich, Root Mean Square Layer Normalization (2019), equation 4",
    dtypes=("float32", "bfloat16", "float16"),
    limits="any width, any number of rows, any strides; weight in any floating dtype",
    operators=(
        Operator(
            name="rms_norm",
            reference=rms_norm,
            backward=rms_norm_backward,
            eager="rms_norm_eager",
            sample=_sample,
            registers=("rms_norm", "rms_norm_backward"),
            shapes={
                f"{rows} x {width}": {
                    "input": Array((rows, width), grad=True),
                    "weight": Array((width,), grad=True),
                }
                for rows, width in [(32768, 1024), (32768, 4096), (16384, 8192), (8192, 32768), (4096, 131072)]
            },
        ),
    ),
    kernels={
        "rms_norm_forward": Kernel(
            "kernel:rms_norm_forward",
            {
                "x_ptr": "*{dtype}",
                "w_ptr": "*{dtype}",
                "y_ptr": "*{dtype}",
                "rstd_ptr": "*fp32",
                "rows": "i32",
                "width": "i32:16",
                "stride_x": "i32:16",
                "eps": "fp32",
                "weight_offset": "fp32",
            },
            (
                {"HAS_WEIGHT": True, "CAST_BEFORE_WEIGHT": False, "ONE_TILE": True},
                {"HAS_WEIGHT": True, "CAST_BEFORE_WEIGHT": True, "ONE_TILE": False},
            ),
        ),
        "rms_norm_backward": Kernel(
            "kernel:rms_norm_backward",
            {
                "dy_ptr": "*{dtype}",
                "x_ptr": "*{dtype}",
                "w_ptr": "*{dtype}",
                "rstd_ptr": "*fp32",
                "dx_ptr": "*{dtype}",
                "dw_ptr": "*fp32",
                "rows": "i32",
                "width": "i32:16",
                "stride_dy": "i32:16",
                "stride_x": "i32:16",
                "weight_offset": "fp32",
            },
            tuple({"HAS_WEIGHT": True, "WEIGHT_GRAD": True, "ONE_TILE": one} for one in (True, False)),
        ),
    },
)
