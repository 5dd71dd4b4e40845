"""The command line: what each command says, and how it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from fusedops import catalog
from fusedops.cli import app


def run(*args, code=0):
    result = CliRunner(env={"COLUMNS": "140"}).invoke(app, args)
    assert result.exit_code == code, result.output
    return result.output


def test_list_names_every_entry_and_operator():
    output = run("list")
    for entry in catalog.entries():
        assert entry.name in output
        assert all(operator.name in output for operator in entry.operators)


@pytest.mark.parametrize("name", catalog.names())
def test_show_tells_signature_limits_configs_and_reference(name):
    entry = catalog.get(name)
    output = " ".join(run("show", name).split())
    assert all(f"def {operator.name}(" in output for operator in entry.operators)
    assert all(row.kernel in output for row in entry.configs.rows)
    assert entry.limits in output
    assert "measured" in output
    assert "import numpy as np" in output


@pytest.mark.parametrize("command", ["show", "verify"])
def test_an_unknown_entry_is_refused_with_the_names(command):
    output = run(command, "rmsnorm", code=2)
    assert "no catalogue entry is named 'rmsnorm'" in output
    assert "rms_norm" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(("given", "answer"), [("tpu", "'tpu' is no device"), ("cuda:99", "'cuda:99' is not there")])
def test_an_impossible_device_is_refused(given, answer):
    assert answer in run("verify", "--device", given, code=2)


def test_verify_passes_and_tells_what_ran(device):
    output = run("verify", "rms_norm", "--seeds", "2")
    assert "6 of 6 within tolerance" in output  # two operators in three dtypes
    assert ("kernel" if device == "cuda" else "PyTorch's version") in output


def test_verify_fails_on_a_wrong_operator(monkeypatch):
    right = catalog.get("rms_norm").load("op", "rms_norm")
    monkeypatch.setattr("fusedops.catalog.rms_norm.op.rms_norm", lambda *args, **kwargs: right(*args, **kwargs) * 1.05)
    assert "FAILED" in run("verify", "rms_norm", "--seeds", "2", code=1)


def test_verify_fails_on_an_operator_that_raises(monkeypatch):
    def raises(**arguments):
        raise RuntimeError("out of luck")

    monkeypatch.setattr("fusedops.catalog.rms_norm.op.rms_norm", raises)
    output = run("verify", "rms_norm", "--seeds", "2", code=1)
    assert "raised RuntimeError: out of luck" in output


def test_doctor_tells_versions_and_what_runs(device):
    output = run("doctor")
    assert torch.__version__.partition("+")[0] in output
    assert all(name in output for name in catalog.names())
    assert "writable" in output
    assert ("the Triton kernel" if device == "cuda" else "PyTorch sees no GPU") in output


def test_doctor_tells_of_a_cache_that_is_not_writable(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/nowhere")
    assert "not writable" in run("doctor")


def test_help_needs_no_torch():
    code = "import sys, fusedops.cli as c\ntry: c.main()\nfinally: assert not {'torch', 'numpy'} & {*sys.modules}"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("list", "show", "verify", "doctor", "demo"):
        assert command in done.stdout
