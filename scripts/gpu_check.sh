#!/bin/bash
# Run everything that is marked for GPUs on a real one, with figures: about ten minutes. Put the output into docs/results.
#
#   scripts/gpu_check.sh [FILE]        the output also goes to FILE (default: gpu-check.txt)
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
python=$PYTHON
[[ -x $python ]] || { echo "no $python: run scripts/setup.sh --test first" >&2; exit 2; }
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "torch finds no GPU. Install a torch with CUDA into the environment of $python" >&2
    exit 2
}
check() {
    git rev-parse HEAD 2>/dev/null || true
    nvidia-smi -L || true
    status=0
    tests=$(cd scripts && "$python" -c 'from simulated_gpu import TESTS; print(*TESTS)')
    # Tests that need two GPUs are skipped on one, by name.
    # shellcheck disable=SC2086
    DING_STORE_TEST_CUDA=1 timeout 420 "$python" -m pytest -n 0 -q -rs $tests || status=1
    timeout 180 "$python" scripts/gpu_figures.py || status=1
    return $status
}
check 2>&1 | tee "${1:-gpu-check.txt}"
