#!/usr/bin/env bash
# compute-sanitizer over every operator of the catalogue, forward and backward, on one small random input a dtype.
#     bench/sanitize.sh [python]        (needs a GPU and CUDA's compute-sanitizer; exits with 1 at the first finding)
set -euo pipefail
python=${1:-python3}
# Without PyTorch's cache each tensor is an allocation of its own, and a read past its end is one that memcheck sees.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
for tool in memcheck racecheck; do
    for entry in $("$python" -c 'from fusedops import catalog; print(*catalog.names())'); do
        echo "$tool $entry"
        compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" -c 'from fusedops.cli import main; main()' verify "$entry" --seeds 1
    done
done
