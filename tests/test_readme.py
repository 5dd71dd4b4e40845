"""The README's example runs as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fusedops.formats import gguf

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_runs(device, monkeypatch, capsys):
    loaded = []
    monkeypatch.setattr(gguf, "load_linears", lambda *arguments: loaded.append(arguments))
    model = torch.nn.Sequential(torch.nn.LayerNorm(256), torch.nn.Linear(256, 512), torch.nn.Softmax(-1)).to(device)
    names: dict[str, Any] = {
        "x": torch.randn(2, 4096, device=device),
        "weight": torch.randn(4096, device=device),
        "q": torch.randn(1, 4, 8, 64, device=device),
        "k": torch.randn(1, 2, 8, 64, device=device),
        "v": torch.randn(1, 2, 8, 64, device=device),
        "model": model,
    }
    exec(README.split("```python")[1].split("```")[0], names)
    torch.testing.assert_close(names["y"], torch.nn.functional.rms_norm(names["x"], (4096,), names["weight"], 1e-6))
    assert names["o"].shape == names["q"].shape
    assert type(model[0]) is torch.nn.LayerNorm, "swap was undone"
    printed = capsys.readouterr().out
    assert "1 × LayerNorm" in printed
    assert "Int4Linear" in printed
    assert loaded == [(model, "model.Q4_1.gguf")]
