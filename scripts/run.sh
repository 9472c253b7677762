#!/usr/bin/env bash
# Sets everything up and runs the main job: CartPole DQN through the store, then the same job in stock DI-engine.
# Usage: scripts/run.sh [--no-compare] [--seeds N ...] [--busy]   (scripts/run.sh --help lists all options)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
export PYTHONWARNINGS=ignore PYTHONPATH=
exec "${DING_STORE_VENV:-$root/.venv}/bin/python" "$root/scripts/cartpole.py" "$@"
