"""Flash attention: softmax(scale · Q · Kᵀ) · V, block by block."""

from fusedops.catalog import Array, Draw, Entry, Kernel, Operator, Sample

from .reference import flash_attention, flash_attention_backward


def _sample(draw: Draw) -> Sample:
    batch, heads_kv = draw.integer(1, 2), draw.integer(1, 2)
    heads_q = heads_kv * draw.integer(1, 3)
    seq_q, seq_kv = draw.integer(0, 70), draw.integer(0, 70)
    head_dim = draw.choice([16, 24, 40, 64])
    head_dim_v = draw.choice([head_dim, head_dim, 32])
    return {
        "query": Array((batch, heads_q, seq_q, head_dim), scale=draw.choice([1.0, 5.0]), grad=True),
        "key": Array((batch, heads_kv, seq_kv, head_dim), grad=True),
        "value": Array((batch, heads_kv, seq_kv, head_dim_v), grad=True),
        "softmax_scale": draw.choice([None, 0.3]),
        "causal": draw.choice([False, True]),
        "causal_alignment": draw.choice(["top_left", "bottom_right"]),
    }


def _shape(batch: int, heads_q: int, heads_kv: int, seq: int, head_dim: int, causal: bool) -> Sample:
    return {
        "query": Array((batch, heads_q, seq, head_dim), grad=True),
        "key": Array((batch, heads_kv, seq, head_dim), grad=True),
        "value": Array((batch, heads_kv, seq, head_dim), grad=True),
        "causal": causal,
    }


def _signature(outputs: dict[str, str], strides: str, scale: str) -> dict[str, str]:
    tensors = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*{dtype}") | outputs
    # Strides of whole heads and rows: 16 elements divide them wherever 16 divides the head dim.
    steps = {f"stride_{tensor}{axis}": "i32:16" for tensor in strides for axis in ("bh" + "nm"[tensor in "qd"])}
    sizes = dict.fromkeys(("batch", "heads_q", "heads_kv", "seq_q", "seq_kv"), "i32")
    return tensors | steps | sizes | {scale: "fp32", "causal_shift": "i32"}


_STATISTICS = {"dout_ptr": "*{dtype}", "lse_ptr": "*fp32", "delta_ptr": "*fp32"}
# The causal kernel holds the other one: the same loops, with and without a mask.
_CAUSAL = {"CAUSAL": True, "PRECISION": "ieee"}

ENTRY = Entry(
    name="flash_attention",
    summary="Scaled dot-product attention without the score matrix in memory",
    source="Dao, FlashAttention-2 (2023), algorithms 1 and 2",
    dtypes=("float32", "bfloat16", "float16"),
    limits="head_dim and head_dim_v 1 to 256, any lengths and strides, heads_q a multiple of heads_kv",
    uses_dot=True,
    operators=(
        Operator(
            name="flash_attention",
            reference=flash_attention,
            backward=flash_attention_backward,
            eager="flash_attention_eager",
            sample=_sample,
            # The backward recomputes P from scores of up to 100 and their lse, each rounded to float32.
            tolerance={"float32": 4e-6},
            registers=("flash_attention", "flash_attention_backward"),
            shapes={
                f"{batch} x {heads_q}/{heads_kv} x {seq} x {head_dim}{', causal' * causal}": _shape(
                    batch, heads_q, heads_kv, seq, head_dim, causal
                )
                for batch, heads_q, heads_kv, seq, head_dim in [
                    (8, 32, 32, 2048, 64),
                    (8, 16, 16, 2048, 128),
                    (2, 16, 16, 8192, 128),
                    (2, 32, 8, 4096, 128),
                    (2, 8, 8, 8192, 256),
                ]
                for causal in (False, True)
            },
        ),
    ),
    kernels={
        "attention_forward": Kernel(
            "forward:attention_forward",
            _signature({"out_ptr": "*{dtype}", "lse_ptr": "*fp32"}, "qkv", "scale_log2"),
            (_CAUSAL | {"WITH_LSE": True},),
        ),
        "attention_delta": Kernel(
            "backward:attention_delta",
            {"out_ptr": "*{dtype}", "dout_ptr": "*{dtype}", "delta_ptr": "*fp32"}
            | {"stride_db": "i32:16", "stride_dh": "i32:16", "stride_dm": "i32:16", "heads_q": "i32", "seq_q": "i32"},
        ),
        "attention_backward_kv": Kernel(
            "backward:attention_backward_kv",
            _signature(_STATISTICS | {"dk_ptr": "*{dtype}", "dv_ptr": "*{dtype}"}, "qkvd", "scale"),
            (_CAUSAL,),
        ),
        "attention_backward_q": Kernel(
            "backward:attention_backward_q",
            _signature(_STATISTICS | {"dq_ptr": "*{dtype}"}, "qkvd", "scale"),
            (_CAUSAL,),
        ),
    },
)
