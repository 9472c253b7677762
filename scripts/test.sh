#!/usr/bin/env bash
# Set up what the tests need and run them, two files at a time (-n 0: one test after the other, for --pdb and the like).
# Arguments go to pytest; paths among them start at the checkout's root.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The codecs, and the environments whose pipelines the tests run.
EXTRAS=(lz4 zstd atari mujoco pettingzoo smac smax gobigger)
"$ROOT/scripts/setup.sh" --test "${EXTRAS[@]/#/--extra=}"
# Tests start many processes: one thread each, or they fight for the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Commands that tests start by name are this environment's.
export PATH="$VENV/bin:$PATH"
cd "$ROOT"
# A file's tests stay together: they share what is made once per module. Files in their order, which ends with short ones.
exec "$PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=25 --durations-min=5 "$@"
