"""Time candidate configs of a kernel on this machine's GPU and print the fastest row of each shape.

    python bench/tune.py rms_norm rms_norm_forward --backward 0 --grid '{"BLOCK_M": [1, 2], "num_warps": [4, 8]}'

Shapes are the entry's own ``shapes``. Candidates are compiled in parallel processes first (about a second each)
and then timed one after another in this one, with L2 cleared between runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
import triton

from fusedops import catalog
from fusedops.catalog import check

Config = dict[str, Any]


def runnable(entry_name: str, label: str, dtype: str, backward: bool) -> tuple[catalog.Entry, Any]:
    """The entry, and a function of no arguments that runs the operator of the shape once."""
    entry = catalog.get(entry_name)
    operator = next(operator for operator in entry.operators if label in operator.shapes)
    arguments = check.materialize(operator.shapes[label], getattr(torch, dtype), "cuda", seed=0)
    function = entry.load("op", operator.name)
    if not backward:
        with torch.no_grad():
            function(**arguments)
        return entry, lambda: function(**arguments)
    output = function(**arguments)
    wanted = [v for v in arguments.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    grad = torch.randn_like(output)
    return entry, lambda: torch.autograd.grad(output, wanted, grad, retain_graph=True)


def warm(entry_name: str, kernel: str, label: str, dtype: str, backward: bool, configs: list[Config]) -> None:
    """Compile the configs into Triton's cache, by running each once."""
    entry, run = runnable(entry_name, label, dtype, backward)
    for config in configs:
        with entry.configs.trial(kernel, config), torch.set_grad_enabled(backward):
            try:
                run()
                torch.cuda.synchronize()
            except triton.runtime.errors.OutOfResources:
                continue


def measure(entry_name: str, kernel: str, label: str, dtype: str, backward: bool, configs: list[Config]) -> list:
    """[(microseconds, config)], fastest first; what needs more than the chip has is left out."""
    entry, run = runnable(entry_name, label, dtype, backward)
    times = []
    for config in configs:
        with entry.configs.trial(kernel, config), torch.set_grad_enabled(backward):
            try:
                times.append((1e3 * triton.testing.do_bench(run, warmup=5, rep=30, return_mode="median"), config))
            except triton.runtime.errors.OutOfResources:
                continue
    return sorted(times, key=lambda pair: pair[0])


def versions() -> dict[str, str]:
    """What a figure was measured with."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entry")
    parser.add_argument("kernel")
    parser.add_argument("--grid", type=json.loads, required=True, help="JSON: config key → values")
    parser.add_argument("--backward", type=int, default=0, help="1 to time the backward pass")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shapes", nargs="*", help="labels of the entry's shapes; all without it")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--top", type=int, default=3)
    arguments = parser.parse_args()

    keys = list(arguments.grid)
    configs = [dict(zip(keys, values, strict=True)) for values in itertools.product(*arguments.grid.values())]
    shapes = [label for op in catalog.get(arguments.entry).operators for label in op.shapes]
    shapes = arguments.shapes or shapes
    what = (arguments.entry, arguments.kernel)
    how = (arguments.dtype, bool(arguments.backward))
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(warm, *what, label, *how, configs[i :: arguments.workers])
            for label in shapes
            for i in range(arguments.workers)
        ]
        for job in jobs:
            job.result()
    print(json.dumps(versions()))
    for label in shapes:
        for us, config in measure(*what, label, *how, configs)[: arguments.top]:
            print(
                json.dumps({"kernel": arguments.kernel, "shape": label, "us": round(us, 2), "config": config}),
                flush=True,
            )


if __name__ == "__main__":
    main()
