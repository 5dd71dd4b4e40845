"""RMSNorm: y = x / sqrt(mean(x²) + eps) · w."""

from fusedops.catalog import SUM_PARTIALS, Array, Draw, Entry, Kernel, Operator, Sample

from .reference import add_rms_norm, add_rms_norm_backward, rms_norm, rms_norm_backward


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


def _add_sample(draw: Draw) -> Sample:
    sample = dict(_sample(draw))
    input = sample.pop("input")
    return {"input": input, "residual": Array(input.shape, scale=input.scale, grad=True), **sample}


_FORWARD = {
    "x_ptr": "*{dtype}",
    "residual_ptr": "*{dtype}",
    "w_ptr": "*{dtype}",
    "y_ptr": "*{dtype}",
    "sum_ptr": "*{dtype}",
    "rstd_ptr": "*fp32",
    "rows": "i32",
    "width": "i32:16",
    "stride_x": "i32:16",
    "stride_residual": "i32:16",
    "eps": "fp32",
    "weight_offset": "fp32",
}
_PLAIN = {"residual_ptr": None, "sum_ptr": None}
_FORWARD_VARIANTS = (
    {**_PLAIN, "CAST_BEFORE_WEIGHT": False, "ONE_TILE": True},
    {"CAST_BEFORE_WEIGHT": True, "ONE_TILE": False},
    {**_PLAIN, "w_ptr": None, "CAST_BEFORE_WEIGHT": False, "ONE_TILE": False},
)
_BACKWARD = {
    "dy_ptr": "*{dtype}",
    "x_ptr": "*{dtype}",
    "w_ptr": "*{dtype}",
    "rstd_ptr": "*fp32",
    "dsum_ptr": "*{dtype}",
    "dx_ptr": "*{dtype}",
    "dw_ptr": "*fp32",
    "rows": "i32",
    "width": "i32:16",
    "stride_dy": "i32:16",
    "stride_x": "i32:16",
    "stride_dsum": "i32:16",
    "weight_offset": "fp32",
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
                for rows, width in [
                    *[(32768, 1024), (32768, 4096), (16384, 8192), (8192, 16384), (8192, 32768)],
                    *[(4096, 65536), (4096, 131072)],
                ]
            },
        ),
        Operator(
            name="add_rms_norm",
            reference=add_rms_norm,
            backward=add_rms_norm_backward,
            eager="add_rms_norm_eager",
            sample=_add_sample,
            registers=("add_rms_norm", "rms_norm_backward"),
            shapes={
                f"{rows} x {width}": {
                    "input": Array((rows, width), grad=True),
                    "residual": Array((rows, width), grad=True),
                    "weight": Array((width,), grad=True),
                }
                for rows, width in [(32768, 4096), (16384, 8192)]
            },
        ),
    ),
    kernels={
        "rms_norm_forward": Kernel("kernel:rms_norm_forward", _FORWARD, _FORWARD_VARIANTS),
        "rms_norm_forward_split": Kernel(
            "kernel:rms_norm_forward_split",
            {**_FORWARD, "slots_ptr": "*i64", "chunk": "i32:16", "splits": "i32"},
            ({**_PLAIN, "CAST_BEFORE_WEIGHT": False, "SPLITS": 8},),
            backends=("cuda",),
        ),
        "rms_norm_backward": Kernel(
            "backward:rms_norm_backward",
            _BACKWARD,
            ({"dsum_ptr": None, "ONE_TILE": True}, {"w_ptr": None, "dw_ptr": None, "ONE_TILE": False}),
        ),
        "rms_norm_backward_split": Kernel(
            "backward:rms_norm_backward_split",
            {**_BACKWARD, "slots_ptr": "*i64", "chunk": "i32:16", "splits": "i32"},
            ({"dsum_ptr": None, "SPLITS": 8},),
            backends=("cuda",),
        ),
        "sum_partials": SUM_PARTIALS,
    },
)
