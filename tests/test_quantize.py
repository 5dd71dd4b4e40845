"""fusedops.quantize on models of torch's modules and transformers' Conv1D."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch

import fusedops
from fusedops import nn, runtime
from fusedops.surgery import quantization

CLASSES = {"int4": nn.Int4Linear, "fp8": nn.FP8Linear}
each_scheme = pytest.mark.parametrize("scheme", CLASSES)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 64)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False), torch.nn.GELU(), torch.nn.Linear(128, 64))
            for _ in range(2)
        )
        self.tied = torch.nn.Linear(64, 50, bias=False)
        self.tied.weight = self.embedding.weight
        self.lm_head = torch.nn.Linear(64, 50)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(x) + self.tied(x)


LAYERS = ["layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2"]


@pytest.fixture
def model(device):
    torch.manual_seed(0)
    return Model().to(device)


@pytest.fixture
def tokens(device):
    return torch.arange(10, device=device).view(2, 5)


def quantized_paths(model):
    return [path for path, module in model.named_modules() if isinstance(module, nn.Int4Linear | nn.FP8Linear)]


def actual_bytes(model):
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])


@each_scheme
def test_quantize(scheme, model, tokens):
    expected, before = model(tokens), actual_bytes(model)
    bias = model.layers[0][2].bias
    model.eval()
    report = fusedops.quantize(model, scheme, group_size=64)
    assert [item.path for item in report.replaced] == quantized_paths(model) == LAYERS
    assert all(type(model.get_submodule(path)) is CLASSES[scheme] for path in LAYERS)
    assert {item.path: item.reason.split(";")[0] for item in report.left} == {
        "tied": "its weight is tied to another module's",
        "lm_head": "the output head",
    }
    assert report.bytes_before == before
    assert report.bytes_after == actual_bytes(model) < before
    assert "→" in str(report).splitlines()[-1]
    assert model.layers[0][2].bias is bias
    assert not model.layers[0][2].training
    error = (model(tokens) - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.1

    parts = [model.get_submodule(path) for path in LAYERS]
    again = fusedops.quantize(model, scheme, group_size=64)
    assert not again
    assert "already quantized" in str(again)
    assert [model.get_submodule(path) for path in LAYERS] == parts


@each_scheme
def test_the_weights_are_the_rounded_ones(scheme, model):
    linear = model.layers[0][0]
    weight = linear.weight.detach().clone()
    fusedops.quantize(model, scheme, group_size=32, symmetric=True)
    layer = model.layers[0][0]
    single = nn.Int4Linear.from_linear(linear, 32, True) if scheme == "int4" else nn.FP8Linear.from_linear(linear)
    assert torch.equal(layer.dequantize(), single.dequantize())
    assert torch.equal(linear.weight, weight), "the old layer is as it was"


@each_scheme
def test_checkpoints_copies_and_conversions_of_a_quantized_model(scheme, model, tokens):
    fusedops.quantize(model, scheme, group_size=32)
    other = Model().to(tokens.device)
    fusedops.quantize(other, scheme, group_size=32)
    other.load_state_dict(model.state_dict())
    for twin in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(tokens), model(tokens))
    packed = [buffer.clone() for buffer in model.buffers()]
    model.bfloat16()
    assert all(a.dtype == b.dtype for a, b in zip(model.buffers(), packed, strict=True))
    assert model(tokens).dtype == torch.bfloat16


@each_scheme
def test_dry_run_reports_the_same_and_changes_nothing(scheme, model):
    planned = fusedops.quantize(model, scheme, dry_run=True, group_size=32)
    assert not quantized_paths(model)
    assert planned == fusedops.quantize(model, scheme, group_size=32)


def test_include_and_exclude(model):
    fusedops.quantize(model, "int4", group_size=32, exclude="layers.0", include=["layers", "lm_head"])
    assert quantized_paths(model) == ["layers.1.0", "layers.1.2", "lm_head"], "include names the head"
    assert fusedops.quantize(model, "int4", group_size=32, exclude=[torch.nn.Module]).replaced == []
    with pytest.raises(ValueError, match=r"exclude: 'layers\.2' matches no module"):
        fusedops.quantize(model, "int4", exclude=["layers.2"])


def spoil_nan(model):
    model.layers[1][2].weight.data[3, 4] = float("nan")


def spoil_inf(model):
    model.layers[1][2].weight.data[3, 4] = float("-inf")


def spoil_meta(model):
    model.layers[1][2].weight = torch.nn.Parameter(torch.empty(64, 128, device="meta"))


def spoil_dtype(model):
    weight = torch.zeros(64, 128, dtype=torch.int8)
    model.layers[1][2].weight = torch.nn.Parameter(weight, requires_grad=False)


@each_scheme
@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (spoil_nan, ValueError, r"layers\.1\.2\.weight holds NaN or inf"),
        (spoil_inf, ValueError, r"layers\.1\.2\.weight holds NaN or inf"),
        (spoil_meta, ValueError, r"layers\.1\.2\.weight is on the meta device"),
        (spoil_dtype, TypeError, r"layers\.1\.2\.weight has dtype torch\.int8"),
    ],
)
def test_a_weight_that_cannot_be_quantized_is_refused_before_anything_changes(scheme, spoil, error, message, model):
    spoil(model)
    with pytest.raises(error, match=message):
        fusedops.quantize(model, scheme, group_size=32)
    assert not quantized_paths(model)
    assert len(fusedops.quantize(model, scheme, group_size=32, exclude="layers.1.2")) == 3


def test_a_group_size_that_does_not_fit_is_refused_with_layer_and_numbers(model):
    model.odd = torch.nn.Linear(96, 8).to(model.lm_head.weight.device)
    with pytest.raises(ValueError, match=r"layers\.0\.0.*\[32, 64\] for K = 64.*got 128.*exclude=\['layers\.0\.0'\]"):
        fusedops.quantize(model, "int4")
    with pytest.raises(ValueError, match=r"odd.*K = 96.*got 64"):
        fusedops.quantize(model, "int4", group_size=64)
    assert not quantized_paths(model)
    with pytest.raises(ValueError, match="scheme must be one of 'int4', 'fp8', got 'int8'"):
        fusedops.quantize(model, "int8")


@each_scheme
def test_a_failing_step_leaves_the_model_as_it_was(scheme, model, monkeypatch):
    modules = dict(model.named_modules())
    made = []

    def fails_at_the_third(*arguments):
        made.append(arguments)
        if len(made) == 3:
            raise RuntimeError("out of memory")
        return original(*arguments)

    original = quantization._quantized
    monkeypatch.setattr(quantization, "_quantized", fails_at_the_third)
    with pytest.raises(RuntimeError, match="out of memory"):
        fusedops.quantize(model, scheme, group_size=32)
    assert dict(model.named_modules()) == modules


class MyLinear(torch.nn.Linear):
    pass


def test_what_is_no_plain_linear_is_left_alone_with_the_reason(device):
    patched = torch.nn.Linear(64, 64)
    patched.forward = lambda input: input  # type: ignore[method-assign]
    model = torch.nn.ModuleDict(
        {
            "mine": MyLinear(64, 64),
            "patched": patched,
            "encoder": torch.nn.TransformerEncoderLayer(64, 2, 64, batch_first=True),
        }
    ).to(device)
    report = fusedops.quantize(model, "fp8")
    assert not report
    reasons = {item.path: item.reason for item in report.left}
    assert "subclass" in reasons["mine"]
    assert "subclass" in reasons["encoder.self_attn.out_proj"]
    assert "on the instance" in reasons["patched"]
    assert "TransformerEncoderLayer reads its weight" in reasons["encoder.linear1"]
    assert "the model itself" in str(fusedops.quantize(torch.nn.Linear(64, 64), "int4"))


def test_shared_layers_stay_shared_and_hooks_stay(device):
    shared = torch.nn.Linear(64, 64).to(device)
    calls = []
    shared.register_forward_hook(lambda module, args, output: calls.append(type(module)))
    model = torch.nn.ModuleDict({"first": shared, "second": shared})
    assert len(fusedops.quantize(model, "int4", group_size=64)) == 1
    assert model["first"] is model["second"]
    model["first"](torch.randn(2, 64, device=device))
    assert calls == [nn.Int4Linear]
    model = torch.nn.ModuleDict({"first": shared, "second": shared})
    assert not fusedops.quantize(model, "int4", group_size=64, exclude="second")


@each_scheme
def test_conv1d_is_transposed(scheme, device):
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    conv = pytorch_utils.Conv1D(48, 64).to(device)
    torch.nn.init.normal_(conv.bias)
    model = torch.nn.Sequential(conv)
    x = torch.randn(2, 3, 64, device=device)
    expected = conv(x)
    report = fusedops.quantize(model, scheme, group_size=32)
    assert report.replaced[0].what == "Conv1D"
    assert (model[0].in_features, model[0].out_features, model[0].nf) == (64, 48, 48)
    assert model[0].bias is conv.bias
    assert (model(x) - expected).norm() / expected.norm() < 0.15


def test_fp8_without_fp8_units_is_told_before_the_model_is_touched(model, monkeypatch):
    old = runtime.DeviceFacts("sm_80", "NVIDIA A100", 108, 166_912)
    monkeypatch.setattr(runtime, "facts", lambda device: old)
    assert quantization._without_fp8(torch.device("cuda", 0)) == "NVIDIA A100"
    assert quantization._without_fp8(torch.device("cpu")) == ""
    monkeypatch.setattr(quantization, "_without_fp8", lambda device: "NVIDIA A100")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="A100"):
            fusedops.quantize(model, "fp8")
    assert not quantized_paths(model)
    with pytest.warns(UserWarning, match="NVIDIA A100 has no float8 arithmetic: it is emulated") as caught:
        report = fusedops.quantize(model, "fp8")
    assert caught[0].filename == __file__
    assert "note: NVIDIA A100 has no float8" in str(report)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_progress_bar_shows_on_a_terminal_only(model, capsys, monkeypatch):
    pytest.importorskip("rich")
    fusedops.quantize(copy.deepcopy(model), "int4", group_size=32)
    assert capsys.readouterr() == ("", "")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    fusedops.quantize(copy.deepcopy(model), "int4", group_size=32, progress=False)
    assert not terminal.getvalue()
    fusedops.quantize(model, "int4", group_size=32)
    assert "Quantizing" in terminal.getvalue()
