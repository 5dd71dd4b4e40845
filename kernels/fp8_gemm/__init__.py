"""fp8 linear: y = q(x) · (weight · weight_scale)ᵀ + bias, with q(x) the activations rounded to e4m3."""

from fusedops.catalog import Array, Draw, Entry, Kernel, Operator, Sample

from .reference import fp8_gemm, fp8_gemm_backward, fp8_gemm_unrounded


def _sample(draw: Draw) -> Sample:
    n, k = draw.integer(1, 80), draw.integer(1, 150)
    lead = tuple(draw.integer(0, 5) for _ in range(draw.integer(0, 3)))
    return {
        "input": Array((*lead, k), scale=draw.choice([1e-3, 1.0, 30.0]), grad=True),
        "weight": Array((n, k), "float8_e4m3fn", scale=draw.choice([0.01, 100.0])),
        "weight_scale": Array(draw.choice([(), (n,)]), "float32", "uniform", scale=1e-2, offset=1e-4),
        "input_scale": draw.choice([None, Array((), "float32", "uniform", scale=0.1, offset=1e-3)]),
        "bias": draw.choice([None, Array((n,), grad=True)]),
    }


_LAYERS = [(1, 4096, 4096), (16, 28672, 4096), (4096, 4096, 14336), (8192, 8192, 8192)]

ENTRY = Entry(
    name="fp8_gemm",
    summary="Linear layer with e4m3 weights and activations, with scales a tensor or a row",
    source="Micikevicius et al., FP8 Formats for Deep Learning (2022), sections 3 and 4",
    dtypes=("float32", "bfloat16", "float16"),
    limits="any M, N, K, any strides; GPUs without e4m3 matrix units multiply in float16, exactly",
    operators=(
        Operator(
            name="fp8_gemm",
            reference=fp8_gemm,
            backward=fp8_gemm_backward,
            smooth=fp8_gemm_unrounded,
            sample=_sample,
            registers=("fp8_gemm", "fp8_gemm_backward"),
            # sm_90 adds fp8 products with about 14 bits between two promotions (DeepSeek-V3 report, section 3.3.2).
            tolerance={"float32": 5e-4},
            shapes={
                f"{m} x {n} x {k}": {
                    "input": Array((m, k), grad=True),
                    "weight": Array((n, k), "float8_e4m3fn", scale=100.0),
                    "weight_scale": Array((n,), "float32", "uniform", scale=1e-4, offset=1e-4),
                }
                for m, n, k in _LAYERS
            },
        ),
    ),
    kernels={
        "quantize_rows": Kernel(
            "kernel:quantize_rows",
            {
                "x_ptr": "*{dtype}",
                "q_ptr": "*u8",
                "scale_ptr": "*fp32",
                "rows": "i32",
                "width": "i32:16",
                "stride_x": "i32:16",
            },
            (
                {"DYNAMIC": True, "ONE_TILE": True},
                {"DYNAMIC": True, "ONE_TILE": False},
                {"DYNAMIC": False, "ONE_TILE": False},
            ),
        ),
        "fp8_gemm": Kernel(
            "kernel:fp8_gemm",
            {
                "a_ptr": "*u8",
                "b_ptr": "*u8",
                "y_ptr": "*{dtype}",
                "a_scale_ptr": "*fp32",
                "b_scale_ptr": "*fp32",
                "bias_ptr": "*{dtype}",
                "M": "i32",
                "N": "i32:16",
                "K": "i32:16",
                "stride_am": "i32:16",
                "stride_bn": "i32:16",
                "stride_a_scale": "i32",
                "stride_b_scale": "i32",
            },
            ({"HAS_BIAS": True},),
        ),
    },
    uses_dot=True,
)
