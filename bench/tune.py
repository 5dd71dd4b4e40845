"""Time candidate configs on this machine's GPU, and put the fastest of each shape into the config tables.

    python bench/tune.py searches.json --write

    [{"entry": "rms_norm", "kernel": "rms_norm_forward", "shapes": ["32768 x 4096"],
      "grid": {"BLOCK_M": [1], "BLOCK_N": [4096], "num_warps": [4, 8], "num_stages": [1, 2]}}]

The file is a list of searches: an entry, a kernel, whether the forward or the backward pass is timed, labels of
the entry's ``shapes``, and the values to try for each config key (the product of them all). Candidates are compiled in
parallel processes first, then timed one after another in this one, with L2 cleared between runs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton

from fusedops import catalog, runtime
from fusedops.catalog import check
from fusedops.runtime import aot

Config = dict[str, Any]
TOO_BIG = (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError, RuntimeError)


def candidates(search: dict[str, Any]) -> list[Config]:
    """The product of the values of each config key."""
    keys = list(search["grid"])
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*search["grid"].values())]


@functools.lru_cache(maxsize=1)
def runnable(entry_name: str, label: str, dtype: str, backward: bool) -> Callable[[], Any]:
    """A function of no arguments that runs the operator of a shape once, forward or backward."""
    entry = catalog.get(entry_name)
    operator = next(operator for operator in entry.operators if label in operator.shapes)
    arguments = check.materialize(operator.shapes[label], getattr(torch, dtype), "cuda", seed=0)
    function = entry.load("op", operator.name)
    if not backward:
        arguments = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        return lambda: function(**arguments)
    output = function(**arguments)
    wanted = [v for v in arguments.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    grad = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, wanted, grad, retain_graph=True)


def of(search: dict[str, Any], label: str) -> Callable[[], Any]:
    """The function that a search times for a shape."""
    return runnable(search["entry"], label, search.get("dtype", "bfloat16"), search.get("backward", False))


def warm(search: dict[str, Any], label: str, configs: list[Config]) -> None:
    """Compile the configs into Triton's cache, by running each once."""
    run = of(search, label)
    for config in configs:
        with contextlib.suppress(*TOO_BIG), catalog.get(search["entry"]).configs.trial(search["kernel"], config):
            run()
            torch.cuda.synchronize()


def measure(search: dict[str, Any], label: str) -> Iterator[tuple[float, Config, dict[str, int]]]:
    """(microseconds, config, bucket) of each candidate that the chip has the resources for."""
    run = of(search, label)
    for config in candidates(search):
        with (
            contextlib.suppress(*TOO_BIG),
            catalog.get(search["entry"]).configs.trial(search["kernel"], config) as bucket,
        ):
            yield 1e3 * triton.testing.do_bench(run, warmup=5, rep=20, return_mode="median"), config, dict(bucket)


def shared_memory(entry: catalog.Entry, row: dict[str, Any]) -> int:
    """The most shared memory that any variant of the row's kernel needs, in bytes."""
    made = runtime.Row(row["kernel"], row["arch"], row["config"], row["bucket"], row["dtype"], 0, None)
    variants = entry.kernels[made.kernel].variants
    jobs = [aot.Job(entry, made, variant, row["dtype"], made.arch) for variant in variants]
    return max(aot.compile_job(job).metadata.shared for job in jobs)


def versions() -> dict[str, str]:
    """What a figure was measured with."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def write(path: Path, row: dict[str, Any]) -> None:
    """Put a row in place of the one for the same kernel, architecture, dtype and bucket, or at the end."""
    rows = json.loads(path.read_text())["rows"]

    def key(row: dict[str, Any]) -> tuple:
        return row["kernel"], row["arch"], row.get("dtype"), row.get("bucket", {})

    rows = [old for old in rows if key(old) != key(row)] + [row]
    path.write_text('{"rows": [\n' + ",\n".join("  " + json.dumps(row) for row in rows) + "\n]}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("searches", type=Path)
    parser.add_argument("--write", action="store_true", help="write the fastest rows into the entries' configs.json")
    parser.add_argument("--only", help="the one kernel to tune")
    parser.add_argument("--workers", type=int, default=12)
    arguments = parser.parse_args()

    searches = [s for s in json.loads(arguments.searches.read_text()) if arguments.only in (None, s["kernel"])]
    pairs = [(search, label) for search in searches for label in search["shapes"]]
    n = arguments.workers
    with ProcessPoolExecutor(n, mp_context=get_context("spawn")) as pool:
        for job in [pool.submit(warm, s, label, candidates(s)[i::n]) for s, label in pairs for i in range(n)]:
            job.result()
    arch = runtime.facts(torch.device("cuda")).arch
    for search, label in pairs:
        best = sorted(measure(search, label), key=lambda timed: timed[0])
        for us, config, bucket in best[:3]:
            print(f"{us:9.1f} us  {search['kernel']}  {label}  {bucket}  {config}", flush=True)
        us, config, bucket = best[0]
        entry = catalog.get(search["entry"])
        row = {"kernel": search["kernel"], "arch": arch, "dtype": search.get("dtype", "bfloat16"), "bucket": bucket}
        row |= {"config": config}
        row |= {"shared": shared_memory(entry, row), "measured": {"shape": label, "us": round(us, 2), **versions()}}
        if arguments.write:
            write(entry.configs.path, row)


if __name__ == "__main__":
    main()
