"""Weight-only int4 linear: y = x · Wᵀ + bias with W = scales · q + offsets a group."""

from fusedops.catalog import Array, Draw, Entry, Kernel, Operator, Sample

from .reference import int4_gemm, int4_gemm_backward


def _arguments(lead: tuple[int, ...], n: int, k: int, group_size: int, bias: bool) -> Sample:
    groups = (n, k // group_size)
    return {
        "input": Array((*lead, k), grad=True),
        "qweight": Array((n, k // 8), dtype="int32", values="bits"),
        "scales": Array(groups, values="uniform", scale=0.02, offset=0.01),
        "offsets": Array(groups, scale=0.05, offset=-0.15),
        "bias": Array((n,), grad=True) if bias else None,
    }


def _sample(draw: Draw) -> Sample:
    group_size = draw.choice([32, 64, 128])
    k = group_size * draw.integer(1, 5)
    lead = (draw.choice([0, 1, 2, 16, 17, 40]), *(draw.integer(1, 2) for _ in range(draw.integer(0, 1))))
    return _arguments(lead, draw.integer(0, 70), k, draw.choice([group_size, k]), draw.choice([True, False]))


def _kernel(function: str, operands: dict[str, str], *variants: dict) -> Kernel:
    return Kernel(
        f"kernel:{function}",
        operands
        | {"q_ptr": "*i32", "scale_ptr": "*{dtype}", "offset_ptr": "*{dtype}"}
        | {"M": "i32", "N": "i32", "K": "i32:16", "groups": "i32", "stride_row": "i32:16"},
        variants,
    )


ENTRY = Entry(
    name="int4_gemm",
    summary="Linear layer with 4-bit weights, a scale and an offset a group",
    source="Frantar et al., GPTQ (2022), and Lin et al., AWQ (2023): weight-only 4-bit quantization in groups",
    dtypes=("float32", "bfloat16", "float16"),
    limits="K a multiple of 32; groups of 32, 64, 128 or K; any M and N, any strides",
    uses_dot=True,
    operators=(
        Operator(
            name="int4_gemm",
            reference=int4_gemm,
            backward=int4_gemm_backward,
            eager="int4_gemm_eager",
            sample=_sample,
            registers=("int4_gemm", "int4_gemm_backward"),
            shapes={
                f"{m} x {n} x {k}": _arguments((m,), n, k, 128, bias=False)
                for n, k in [(4096, 4096), (28672, 4096), (8192, 28672)]
                for m in [1, 16, 64, 256]
            },
        ),
    ),
    kernels={
        "int4_gemm_forward": _kernel(
            "int4_gemm_forward",
            {"x_ptr": "*{dtype}", "bias_ptr": "*{dtype}", "y_ptr": "*{dtype}", "partial_ptr": "*fp32"},
            {"GROUP_SIZE": 128, "HAS_BIAS": False, "PRECISION": "ieee"},
            {"GROUP_SIZE": 32, "HAS_BIAS": True, "PRECISION": "ieee"},
        ),
        "int4_gemm_reduce": Kernel(
            "kernel:int4_gemm_reduce",
            {"partial_ptr": "*fp32", "bias_ptr": "*{dtype}", "y_ptr": "*{dtype}", "size": "i64", "N": "i32"},
            ({"SPLITS": 8, "HAS_BIAS": True},),
        ),
        "int4_gemm_backward": _kernel(
            "int4_gemm_backward",
            {"dy_ptr": "*{dtype}", "dx_ptr": "*{dtype}"},
            {"GROUP_SIZE": 128, "PRECISION": "ieee"},
        ),
    },
)
