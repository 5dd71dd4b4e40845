"""fusedops.swap and unswap on models of torch's modules, and the table of replacements."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch

import fusedops
from fusedops import nn, runtime
from fusedops.surgery import replacement
from fusedops.surgery.table import REPLACEMENTS, class_path


class Block(torch.nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8, eps=1e-3)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.final = shared

    def forward(self, x):
        y = self.norm(x)
        return self.final(x + self.attention(y, y, y, need_weights=False)[0])


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        shared = torch.nn.RMSNorm(8)
        self.layers = torch.nn.ModuleList([Block(shared), Block(shared), *(torch.nn.LayerNorm(8) for _ in range(9))])
        self.head = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.LogSoftmax(-1))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def model(device):
    torch.manual_seed(0)
    return Model().to(device)


@pytest.fixture
def x(device):
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).to(device)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3 if actual.is_cuda else 1e-5)


def paths_of(model, cls):
    return [path for path, module in model.named_modules() if type(module) is cls]


def test_swap_and_unswap(model, x):
    before, modules, expected = model.state_dict(), dict(model.named_modules(remove_duplicate=False)), model(x)
    parameters = dict(model.named_parameters())
    report = fusedops.swap(model)
    assert report
    assert len(report) == 2 + 2 + 1 + 9 + 1
    assert not report.left
    close(model(x), expected)
    assert isinstance(model.layers[0].norm, nn.LayerNorm)
    assert model.layers[0].norm.eps == 1e-3
    assert type(model.layers[1].attention) is nn.MultiheadAttention
    assert model.layers[0].final is model.layers[1].final, "what was shared is shared"
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not fusedops.swap(model), "a second call finds nothing"

    model.eval()
    assert len(fusedops.unswap(model)) == len(report)
    assert dict(model.named_modules(remove_duplicate=False)) == modules, "the very objects are back"
    assert not model.layers[0].norm.training, "with the settings as they are now"
    assert not fusedops.unswap(model)
    close(model(x), expected)


def test_an_optimizer_made_before_still_steps_the_parameters(model, x):
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    fusedops.swap(model)
    for m, optimizer in zip((model, twin), optimizers, strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        close(ours, theirs)


def test_hooks_stay_and_can_still_be_removed(model, x):
    x.requires_grad_()
    calls = []
    norm = model.layers[0].norm
    handle = norm.register_forward_hook(lambda module, args, output: calls.append(module))
    norm.register_full_backward_hook(lambda module, grad_input, grad_output: calls.append("backward"))
    fusedops.swap(model)
    model(x).sum().backward()
    assert calls == [model.layers[0].norm, "backward"]
    handle.remove()
    model(x)
    assert len(calls) == 2


def test_moves_and_conversions_reach_the_original(model):
    original = model.layers[0].norm
    fusedops.swap(model)
    model.to(torch.float64)
    assert original.weight.dtype == torch.float64
    model.layers[0].norm.weight = torch.nn.Parameter(torch.ones_like(original.weight))
    model.layers[0].norm.eps = 0.5
    replaced = model.layers[0].norm.weight
    fusedops.unswap(model)
    assert model.layers[0].norm is original
    assert original.weight is replaced
    assert original.eps == 0.5


def test_deepcopy_and_pickle_of_a_swapped_model(model, x):
    fusedops.swap(model)
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), expected)
        assert other.layers[0].norm.weight is not model.layers[0].norm.weight
        assert len(fusedops.unswap(other)) == 15
        assert type(other.layers[0].norm) is torch.nn.LayerNorm
        assert {id(p) for p in other.parameters()}.isdisjoint({id(p) for p in model.parameters()})
        close(other(x), expected)
    assert type(model.layers[0].norm) is nn.LayerNorm


def test_other_models_and_classes_stay(model):
    other = copy.deepcopy(model)
    forward = torch.nn.LayerNorm.forward
    fusedops.swap(model)
    assert not paths_of(other, nn.LayerNorm)
    assert torch.nn.LayerNorm.forward is forward
    assert type(torch.nn.LayerNorm(8)) is torch.nn.LayerNorm


class MyNorm(torch.nn.LayerNorm):
    def forward(self, input):
        return input


class StrangeRMSNorm(torch.nn.Module):
    def forward(self, input):
        return input


def test_what_is_not_exactly_known_is_left_alone_with_the_reason(x):
    patched, compiled, parametrized = (torch.nn.LayerNorm(8) for _ in range(3))
    patched.forward = lambda input: input * 2  # type: ignore[method-assign]
    compiled.compile(backend="eager")
    torch.nn.utils.parametrizations.weight_norm(parametrized)
    modules = [MyNorm(8), StrangeRMSNorm(), patched, compiled, parametrized]
    model = torch.nn.Sequential(*modules)
    report = fusedops.swap(model)
    assert not report
    assert list(model) == modules
    for item, reason in zip(
        report.left,
        ["a subclass of LayerNorm", "no replacement for", "on the instance", r".compile()", "a subclass"],
        strict=True,
    ):
        assert reason in item.reason
        assert item.reason in str(report)
    report = fusedops.swap(torch.nn.LayerNorm(8))
    assert "the model itself" in report.left[0].reason


def test_a_class_whose_forward_was_patched_is_left_alone(monkeypatch):
    def patched(self, input):
        return input

    monkeypatch.setattr(torch.nn.LayerNorm, "forward", patched)
    report = fusedops.swap(torch.nn.Sequential(torch.nn.LayerNorm(8)))
    assert __name__ in report.left[0].reason


def test_a_module_given_another_class_after_the_swap_is_left_alone_by_unswap(model):
    fusedops.swap(model)
    torch.nn.utils.parametrizations.weight_norm(model.layers[3])
    report = fusedops.unswap(model)
    assert [item.path for item in report.left] == ["layers.3"]


@pytest.mark.parametrize(
    ("options", "swapped"),
    [
        ({"include": "layers.1"}, ["layers.1.norm"]),
        ({"include": ["layers.1", "layers.10"]}, ["layers.1.norm", "layers.10"]),
        ({"include": "layers.?.norm"}, ["layers.0.norm", "layers.1.norm"]),
        ({"include": "norm"}, ["layers.0.norm", "layers.1.norm"]),
        ({"include": Block, "exclude": "0"}, ["layers.1.norm"]),
        ({"include": torch.nn.LayerNorm, "exclude": [Block, "layers.*"]}, []),
        ({"exclude": [torch.nn.ModuleList]}, []),
        ({"exclude": "layers.1"}, ["layers.0.norm", *(f"layers.{i}" for i in range(2, 11))]),
    ],
    ids=str,
)
def test_include_and_exclude_match_whole_components(model, options, swapped):
    report = fusedops.swap(model, **options)
    assert paths_of(model, nn.LayerNorm) == swapped
    assert len(report.items) == 15
    if options.get("exclude") == "layers.1":
        assert type(model.layers[0].final) is torch.nn.RMSNorm, "it is also layers.1.final"


def test_patterns_that_match_nothing_are_refused_before_anything_changes(model):
    misspelt: list[Any] = ["norm", "layers.1.nrom"]
    with pytest.raises(ValueError, match=r"include: 'layers\.1\.nrom' matches no module"):
        fusedops.swap(model, include=misspelt)
    with pytest.raises(ValueError, match=r"exclude: 'layers\.1\.nrom' matches no module"):
        fusedops.swap(model, exclude=misspelt)
    number: Any = 3
    with pytest.raises(TypeError, match="exclude takes module paths"):
        fusedops.swap(model, exclude=[number])
    assert fusedops.swap(model, exclude=[torch.nn.Conv2d]), "a class without instances is no mistake"
    assert paths_of(model, nn.LayerNorm)


def test_dry_run_changes_nothing_and_reports_the_same(model):
    modules = dict(model.named_modules())
    planned = fusedops.swap(model, exclude="layers.4", dry_run=True)
    assert dict(model.named_modules()) == modules
    done = fusedops.swap(model, exclude="layers.4")
    assert planned == done
    assert str(planned) == str(done)


def test_the_report_is_a_table(model):
    assert str(fusedops.swap(model, exclude="layers.4")).splitlines() == [
        "10 × LayerNorm           → fusedops.nn.LayerNorm  (layers.0.norm, … layers.10)",
        " 2 × MultiheadAttention  → fusedops.nn.MultiheadAttention  (layers.0.attention, layers.1.attention)",
        " 1 × RMSNorm             → fusedops.nn.RMSNorm  (layers.0.final)",
        " 1 × LogSoftmax          → fusedops.nn.LogSoftmax  (head.1)",
        "left alone:",
        "1 × LayerNorm  excluded by 'layers.4'  (layers.4)",
    ]
    assert str(fusedops.swap(torch.nn.Linear(2, 2))) == "nothing to replace"


class BreaksAt(dict):
    """A parent's children, of which one cannot be replaced."""

    def __setitem__(self, name, value):
        if name == "7":
            raise RuntimeError("no")
        super().__setitem__(name, value)


def test_a_failing_step_undoes_the_others(model, x):
    modules = dict(model.named_modules(remove_duplicate=False))
    children = model.layers._modules
    model.layers.__dict__["_modules"] = BreaksAt(children)
    with pytest.raises(RuntimeError, match="no"):
        fusedops.swap(model)
    model.layers.__dict__["_modules"] = children
    assert dict(model.named_modules(remove_duplicate=False)) == modules


def rows_of_transformers():
    return [path for path in REPLACEMENTS if path.startswith("transformers.")]


@pytest.mark.skipif(runtime.interpreting(), reason="the interpreter truncates to bfloat16")
@pytest.mark.parametrize("path", rows_of_transformers(), ids=lambda path: path.rpartition(".")[2])
def test_rows_of_the_table_are_bit_equal_to_what_they_replace(path):
    """On the CPU, in every dtype, also where weight and input differ in theirs."""
    pytest.importorskip("transformers")
    module, _, name = path.rpartition(".")
    original = getattr(importlib.import_module(module), name)(32, eps=1e-5)
    torch.manual_seed(0)
    for weight_dtype in (torch.float32, torch.bfloat16, torch.float16):
        original = original.to(weight_dtype)
        torch.nn.init.normal_(original.weight)
        model = torch.nn.Sequential(original)
        assert fusedops.swap(model), class_path(type(original))
        assert type(model[0]) is REPLACEMENTS[path]
        assert model[0].extra_repr() == original.extra_repr()
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = (torch.randn(4, 7, 32) * 3).to(dtype)
            actual, expected = model(x), original(x)
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected), (weight_dtype, dtype)


def test_keys_of_the_table_are_the_classes_own_paths():
    for path in REPLACEMENTS:
        if path.startswith("torch."):
            module, _, name = path.rpartition(".")
            assert class_path(getattr(importlib.import_module(module), name)) == path


def test_model_rms_norms_start_as_the_identity(device):
    x = torch.nn.functional.rms_norm(torch.randn(3, 16, device=device), (16,))
    for cls in (nn.LlamaRMSNorm, nn.GemmaRMSNorm, nn.Olmo2RMSNorm):
        module = cls(16, eps=1e-6, device=device)
        torch.testing.assert_close(module(x), x, rtol=1e-4, atol=1e-4)
        assert replacement._ORIGINAL not in module.__dict__
