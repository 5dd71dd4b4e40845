"""The harness: what holds for every entry of the catalogue, found by walking it."""

from __future__ import annotations

import inspect
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fusedops import catalog, runtime
from fusedops.catalog import check

ENTRIES = list(catalog.entries())
PAIRS = [(entry, operator) for entry in ENTRIES for operator in entry.operators]


def each_operator(having=lambda operator: True):
    """Parametrise a test over the operators of all entries."""
    params = [pytest.param(entry, operator, id=operator.name) for entry, operator in PAIRS if having(operator)]
    return pytest.mark.parametrize(("entry", "operator"), params)


class HypothesisDraw:
    """A sampler's choices, made by hypothesis, which shrinks them when a test fails."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def integer(self, low, high):
        return self._data.draw(st.integers(low, high))

    def choice(self, options):
        return self._data.draw(st.sampled_from(list(options)))


def dtypes_of(entry, device):
    return [getattr(torch, name) for name in check.dtypes(entry, device)]


def draw_arguments(entry, operator, data, device):
    draw = HypothesisDraw(data)
    dtype = draw.choice(dtypes_of(entry, device))
    seed = draw.integer(0, 2**20)
    return check.materialize(operator.sample(draw), dtype, device, seed, draw), seed


def first_arguments(entry, operator, device, seed=0):
    sample = operator.sample(check.RandomDraw(seed))
    return check.materialize(sample, dtypes_of(entry, device)[0], device, seed)


@pytest.mark.usefixtures("poisoned", "no_fallback")
@each_operator()
@settings(max_examples=30)
@given(data=st.data())
def test_operator_matches_the_reference(entry, operator, device, data):
    arguments, seed = draw_arguments(entry, operator, data, device)
    failed = [judged for judged in check.judge(entry, operator, arguments, seed) if not judged.passed]
    assert not failed


@each_operator(lambda operator: operator.eager)
def test_error_is_no_more_than_pytorchs(entry, operator, device):
    """In the mean over many inputs, so that one lucky rounding of either side decides nothing."""
    # The interpreter truncates where the hardware rounds to bfloat16.
    truncates = torch.bfloat16 if runtime.interpreting() and device == "cpu" else None
    for dtype in [dtype for dtype in dtypes_of(entry, device) if dtype != truncates]:
        ours: dict[str, list[float]] = {}
        eager: dict[str, list[float]] = {}
        for seed in range(20):
            sample = operator.sample(check.RandomDraw(seed))
            for judged in check.judge(entry, operator, check.materialize(sample, dtype, device, seed), seed):
                if judged.eager_error is not None and np.isfinite(judged.eager_error):
                    ours.setdefault(judged.what, []).append(judged.error)
                    eager.setdefault(judged.what, []).append(judged.eager_error)
        for what in ours:
            bar = 1.25 * check.root_mean_square(np.array(eager[what])) + 0.1 * torch.finfo(dtype).eps
            assert check.root_mean_square(np.array(ours[what])) <= bar, (what, dtype)


@each_operator()
@settings(max_examples=5)
@given(data=st.data())
def test_two_runs_are_bit_identical_and_leave_the_inputs_alone(entry, operator, device, data):
    arguments, _ = draw_arguments(entry, operator, data, device)
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    function = entry.load("op", operator.name)
    first, second = check.outputs_of(function(**arguments)), check.outputs_of(function(**arguments))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second, strict=True))
    if operator.backward and first[0].requires_grad:
        wanted = [v for v in arguments.values() if isinstance(v, torch.Tensor) and v.requires_grad]
        grads = [torch.ones((), dtype=one.dtype, device=one.device).expand_as(one) for one in first]
        runs = [torch.autograd.grad(check.outputs_of(function(**arguments)), wanted, grads) for _ in range(2)]
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*runs, strict=True))
    assert all(torch.equal(bits(arguments[name]), bits(value)) for name, value in before.items())


def bits(tensor):
    """The tensor's bytes, so that NaN equals NaN."""
    # clone() gives the usual strides to dimensions of size 1 as well, which view() asks for
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


@each_operator(lambda operator: operator.backward)
def test_reference_gradient_is_the_derivative_of_the_reference(entry, operator):
    reference = operator.smooth or operator.reference
    for seed in range(5):
        arguments = check.materialize(operator.sample(check.RandomDraw(seed)), torch.float64, "cpu", seed)
        values = {name: check.to_numpy(value) for name, value in arguments.items()}
        generator = np.random.default_rng(seed)
        outputs = check.outputs_of(reference(**values))
        grads = tuple(generator.standard_normal(output.shape) for output in outputs)
        grad_output = grads if len(grads) > 1 else grads[0]
        for name, gradient in operator.backward(grad_output, **values).items():
            direction = generator.standard_normal(values[name].shape)
            step = 1e-6 * max(1.0, float(np.abs(values[name]).max(initial=0))) * direction
            high = check.outputs_of(reference(**values | {name: values[name] + step}))
            low = check.outputs_of(reference(**values | {name: values[name] - step}))
            numeric = sum(float(np.sum(dy * (a - b)) / 2) for dy, a, b in zip(grads, high, low, strict=True))
            analytic = float(np.sum(gradient * step))
            size = float(np.sum(np.abs(gradient * step)))
            assert abs(numeric - analytic) <= 1e-5 * size + 1e-12, (name, numeric, analytic)


class Recorder(TorchDispatchMode):
    """Notes the calls of our operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fusedops":
            self.calls.append((function, args))
        return function(*args, **kwargs or {})


@pytest.mark.usefixtures("comparable_float8")
@each_operator()
def test_registered_operators_pass_opcheck(entry, operator, device):
    arguments = first_arguments(entry, operator, device, seed=3)
    with Recorder() as recorder:
        outputs = check.outputs_of(entry.load("op", operator.name)(**arguments))
        if operator.backward:
            sum(output.sum() for output in outputs).backward()
    called = {function._opname: (function, args) for function, args in recorder.calls}
    assert set(called) == set(operator.registers)
    for name, (function, args) in called.items():
        differentiable = operator.backward is not None and "backward" not in name
        tensors = [
            arg.detach()
            .clone()
            .requires_grad_(differentiable and arg.dtype in (torch.float32, torch.bfloat16, torch.float16))
            if isinstance(arg, torch.Tensor)
            else arg
            for arg in args
        ]
        torch.library.opcheck(function, tuple(tensors))


@pytest.mark.skipif(runtime.interpreting(), reason="the compiler traces to the same operators")
@each_operator()
def test_compiles_without_a_graph_break(entry, operator, device):
    arguments = first_arguments(entry, operator, device, seed=3)
    function = entry.load("op", operator.name)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    outputs = zip(check.outputs_of(compiled(**arguments)), check.outputs_of(function(**arguments)), strict=True)
    assert all(torch.equal(bits(a), bits(b)) for a, b in outputs)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_entry_is_complete(entry):
    assert entry.folder.name == entry.name
    assert {row.kernel for row in entry.configs.rows} == set(entry.kernels), "each kernel has rows, each row a kernel"
    for kernel, description in entry.kernels.items():
        has_row = any(row.arch == "any" and row.kernel == kernel for row in entry.configs.rows)
        assert has_row or len(description.backends) == 1, "an unknown GPU has a row"
    assert all(row.shared <= 65_536 for row in entry.configs.rows if row.arch == "any"), "it fits every GPU"
    for operator in entry.operators:
        function = entry.load("op", operator.name)
        assert inspect.getdoc(function)
        assert set(inspect.signature(function).parameters) == set(inspect.signature(operator.reference).parameters)
        assert operator.shapes


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_config_table_has_a_row_a_line(entry):
    lines = entry.configs.path.read_text().splitlines()
    assert len(lines) == len(json.loads(entry.configs.path.read_text())["rows"]) + 2


def test_unknown_entry_is_refused_with_the_names():
    with pytest.raises(ValueError, match=r"no catalogue entry is named 'rmsnorm'; there are: .*rms_norm"):
        catalog.get("rmsnorm")
