"""What is installed: the wheel's content, its import in a fresh environment, and what importing costs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from fusedops import catalog

ROOT = Path(__file__).parents[1]
FILES = [path for path in (ROOT / "kernels").glob("*/*") if path.suffix in (".py", ".json")]
# As where neither is installed: find_spec gives None, import raises ModuleNotFoundError.
WITHOUT_OPTIONAL = "import sys; sys.modules.update(triton=None, transformers=None)\n"


def python(code, executable=sys.executable, **env):
    done = subprocess.run(
        [executable, "-I" if executable != sys.executable else "-B", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what is packaged, so that building leaves nothing in the repository."""
    folder = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("fusedops", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source):
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "."]
    done = subprocess.run(pip, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next((source / "dist").glob("*.whl"))


def test_packages_are_the_folders_on_disk():
    tomllib = pytest.importorskip("tomllib")
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    inside = {".".join(init.parent.relative_to(ROOT).parts) for init in (ROOT / "fusedops").rglob("__init__.py")}
    mapped = {f"fusedops.catalog.{init.parent.name}" for init in (ROOT / "kernels").glob("*/__init__.py")}
    assert set(setuptools["packages"]) == inside | mapped
    assert set(setuptools["package-dir"]) == mapped | {"fusedops"}
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would be taken for Hugging Face's package"


def test_wheel_holds_every_entry_and_nothing_named_kernels(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"fusedops/catalog/{file.parent.name}/{file.name}" for file in FILES} <= set(names)
    assert "fusedops/py.typed" in names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"fusedops"}
    assert not [name for name in names if "kernels" in Path(name).parts]
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def test_sdist_holds_what_the_wheel_is_built_from(source):
    build = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    archive = source / "dist" / done.stdout.split()[-1]
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {file.relative_to(ROOT).as_posix() for file in FILES} <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "fusedops/py.typed"} <= names


def test_wheel_works_in_a_fresh_environment(wheel, tmp_path):
    """torch and its like come from this environment by path, so that they are not downloaded again."""
    venv.create(tmp_path / "venv", symlinks=True)
    executable = str(tmp_path / "venv" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", executable, "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site / "this_environment.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    code = """
import importlib.util, fusedops
from fusedops import catalog
for entry in catalog.entries():
    assert str(entry.folder).startswith({site!r}), entry.folder
    for operator in entry.operators:
        entry.load("op", operator.name)
    if importlib.util.find_spec("triton"):
        for kernel in entry.kernels.values():
            entry.load(*kernel.function.split(":"))
    assert entry.configs.rows
kernels = importlib.util.find_spec("kernels")
assert {site!r} not in str(kernels), kernels
print(*catalog.names())
""".format(site=str(site))
    assert python(code, executable).split() == catalog.names()
    listed = subprocess.run([tmp_path / "venv" / "bin" / "fusedops", "list"], capture_output=True, text=True)
    assert all(name in listed.stdout for name in catalog.names()), listed.stderr


def test_without_gpu_triton_and_transformers_every_operator_is_there():
    code = """
import torch, fusedops.functional, fusedops.nn, fusedops.surgery
from fusedops import catalog
for entry in catalog.entries():
    for operator in entry.operators:
        assert callable(entry.load("op", operator.name))
x = torch.randn(3, 8)
torch.testing.assert_close(fusedops.functional.rms_norm(x, (8,)), torch.nn.functional.rms_norm(x, (8,)))
"""
    python(WITHOUT_OPTIONAL + code, CUDA_VISIBLE_DEVICES="")
    python(WITHOUT_OPTIONAL + code, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")


def test_importing_is_cheap():
    """The bound is generous, for a busy machine; README.md states what was measured."""
    code = """
import sys, time, torch
before = {*sys.modules}
start = time.perf_counter()
import fusedops
bare = time.perf_counter() - start
import fusedops.functional, fusedops.nn
assert not {"triton", "transformers", "rich", "typer"} & ({*sys.modules} - before)
print(bare, time.perf_counter() - start)
"""
    bare, everything = map(float, python(code).split())
    print(f"import fusedops: {bare * 1e3:.1f} ms after torch; with functional and nn: {everything * 1e3:.0f} ms")
    assert bare < 0.2
    assert everything < 2
