"""Exact attention in tiles: softmax(softmax_scale · Q Kᵀ) V without the matrix of scores in memory."""

from fusedops.catalog import Array, Draw, Entry, Kernel, Operator, Sample

from .reference import flash_attention, flash_attention_backward


def _sample(draw: Draw) -> Sample:
    # Small, for Triton's interpreter; still several tiles each way.
    batch, heads_kv, group = draw.integer(1, 2), draw.integer(1, 2), draw.choice([1, 1, 2, 3])
    seq_q, seq_kv = draw.integer(0, 50), draw.integer(0, 50)
    head_dim = draw.choice([16, 16, 24, 32, 40, 64, 7, 128])
    head_dim_v = draw.choice([head_dim, head_dim, 16, 48])
    return {
        "query": Array((batch, heads_kv * group, seq_q, head_dim), grad=True),
        "key": Array((batch, heads_kv, seq_kv, head_dim), grad=True),
        "value": Array((batch, heads_kv, seq_kv, head_dim_v), grad=True),
        "softmax_scale": draw.choice([None, 0.2]),
        "causal": draw.choice([False, True]),
        "causal_alignment": draw.choice(["top_left", "bottom_right"]),
    }


def _shape(batch: int, heads_q: int, heads_kv: int, seq: int, head_dim: int, causal: bool) -> tuple[str, Sample]:
    label = f"{batch} x {heads_q}/{heads_kv} heads x {seq} x {head_dim}{' causal' if causal else ''}"
    return label, {
        "query": Array((batch, heads_q, seq, head_dim), grad=True),
        "key": Array((batch, heads_kv, seq, head_dim), grad=True),
        "value": Array((batch, heads_kv, seq, head_dim), grad=True),
        "causal": causal,
    }


_STRIDES = {f"stride_{tensor}{axis}": "i64:16" for tensor in "qkv" for axis in "bhs"}
_SIZES = dict.fromkeys(("heads", "group", "seq_q", "seq_kv", "diagonal"), "i32")
_INPUTS = {"q_ptr": "*{dtype}", "k_ptr": "*{dtype}", "v_ptr": "*{dtype}"}
_GRAD_STRIDES = {f"stride_do{axis}": "i64:16" for axis in "bhs"}
_VARIANTS = ({"HEAD_DIM": "{head_dim}", "HEAD_DIM_V": "{head_dim}", "INPUT_PRECISION": "ieee"},)

ENTRY = Entry(
    name="flash_attention",
    summary="Scaled dot-product attention, causal or not, with grouped key/value heads",
    source="Dao, FlashAttention-2 (2023), algorithms 1 and 2",
    dtypes=("float32", "bfloat16", "float16"),
    limits="head dims to 256, for values also another one; any lengths, any strides; heads_q a multiple of heads_kv",
    uses_dot=True,
    operators=(
        Operator(
            name="flash_attention",
            reference=flash_attention,
            backward=flash_attention_backward,
            eager="flash_attention_eager",
            sample=_sample,
            # A rounding of a score is one of its size, not of the softmax's: exp(s·(1 + eps)) is off by s·eps.
            tolerance={"float32": 2e-6},
            registers=("flash_attention", "flash_attention_backward"),
            shapes=dict(
                _shape(*size)
                for size in [
                    (32, 16, 16, 512, 128, True),
                    (8, 16, 16, 2048, 128, True),
                    (2, 16, 16, 8192, 128, True),
                    (1, 16, 16, 16384, 128, True),
                    (2, 16, 16, 8192, 128, False),
                    (4, 32, 8, 4096, 128, True),
                    (8, 32, 32, 2048, 64, True),
                    (2, 32, 32, 8192, 64, True),
                    (2, 8, 8, 8192, 256, True),
                ]
            ),
        ),
    ),
    kernels={
        "flash_attention_forward": Kernel(
            "kernel:flash_attention_forward",
            {**_INPUTS, "out_ptr": "*{dtype}", "lse_ptr": "*fp32", "softmax_scale": "fp32", **_SIZES, **_STRIDES},
            _VARIANTS,
        ),
        "flash_attention_backward_dq": Kernel(
            "kernel:flash_attention_backward_dq",
            {
                **_INPUTS,
                "out_ptr": "*{dtype}",
                "lse_ptr": "*fp32",
                "do_ptr": "*{dtype}",
                "dq_ptr": "*{dtype}",
                "delta_ptr": "*fp32",
                "softmax_scale": "fp32",
                **_SIZES,
                **_STRIDES,
                **_GRAD_STRIDES,
            },
            _VARIANTS,
        ),
        "flash_attention_backward_dkdv": Kernel(
            "kernel:flash_attention_backward_dkdv",
            {
                **_INPUTS,
                "lse_ptr": "*fp32",
                "do_ptr": "*{dtype}",
                "delta_ptr": "*fp32",
                "dk_ptr": "*{dtype}",
                "dv_ptr": "*{dtype}",
                "softmax_scale": "fp32",
                **_SIZES,
                **_STRIDES,
                **_GRAD_STRIDES,
            },
            _VARIANTS,
        ),
    },
)
