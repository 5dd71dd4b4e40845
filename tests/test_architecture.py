"""The imports point one way: nn, surgery, integrations → functional → catalog.<name>.op → runtime (DESIGN.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What each part may import of fusedops; a name covers what is below it.
MAY_IMPORT = {
    "fusedops.runtime": {"fusedops.runtime"},
    "fusedops.catalog": {"fusedops.catalog", "fusedops.runtime"},
    "fusedops.functional": {"fusedops.catalog", "fusedops.runtime"},
    "fusedops.nn": {"fusedops.nn", "fusedops.functional", "fusedops.catalog", "fusedops.runtime"},
    "fusedops.integrations": {
        *("fusedops.integrations", "fusedops.nn", "fusedops.functional", "fusedops.catalog", "fusedops.runtime"),
        *("fusedops.formats", "fusedops.surgery"),
    },
    "fusedops.surgery": {
        *("fusedops.surgery", "fusedops.integrations", "fusedops.nn", "fusedops.functional", "fusedops.catalog"),
        *("fusedops.runtime", "fusedops.formats"),
    },
}


def module_name(path):
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    parts = ["fusedops", "catalog", *rest] if folder == "kernels" else [folder, *rest]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module_name(path): path for folder in ("fusedops", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))
}


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(name, top_level=False):
    """The modules that a file imports; with ``top_level``, those that importing it imports."""
    path = FILES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()

    def walk(node):
        if is_type_checking(node) or (top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            target = ".".join(filter(None, [base, node.module]))
            # `from . import op` names a module, `from .op import f` does not
            found.update(
                f"{target}.{alias.name}" if f"{target}.{alias.name}" in FILES else target for alias in node.names
            )
        for child in ast.iter_child_nodes(node):
            walk(child)

    walk(ast.parse(path.read_text()))
    return found - {"__future__"}


def covers(parts, module):
    return any(module == part or module.startswith(f"{part}.") for part in parts)


@pytest.mark.parametrize("name", [name for name in FILES if covers(MAY_IMPORT, name)])
def test_imports_point_one_way(name):
    part = next(part for part in MAY_IMPORT if covers({part}, name))
    ours = {module for module in imports(name) if covers({"fusedops"}, module)}
    assert all(covers(MAY_IMPORT[part], module) for module in ours), ours


def entry_files(stem):
    return [name for name in FILES if name.startswith("fusedops.catalog.") and name.rpartition(".")[2] == stem]


@pytest.mark.parametrize("name", entry_files("reference"))
def test_references_import_numpy_alone(name):
    assert {module.partition(".")[0] for module in imports(name)} <= {"numpy", "math"}


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("fusedops.catalog.")])
def test_kernels_never_import_torch_and_what_runs_without_triton_does_not_import_it(name):
    top = {module.partition(".")[0] for module in imports(name, top_level=True)}
    if "triton" in top:
        assert "torch" not in {module.partition(".")[0] for module in imports(name)}
        return
    with_triton = {other for other in FILES if "triton" in {m.partition(".")[0] for m in imports(other, True)}}
    assert not with_triton & imports(name, top_level=True)


def test_the_walk_sees_violations():
    assert "torch" in imports("fusedops.catalog.rms_norm.op")
    assert "fusedops.catalog.rms_norm.kernel" in imports("fusedops.catalog.rms_norm.op")
    assert "fusedops.catalog.rms_norm.kernel" not in imports("fusedops.catalog.rms_norm.op", top_level=True)
    assert "triton" in imports("fusedops.catalog.rms_norm.kernel")
