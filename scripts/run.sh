#!/usr/bin/env bash
# Sets everything up and runs the main job: CartPole DQN through the store, then the same job in stock DI-engine.
# Usage: scripts/run.sh [--no-compare] [--seeds N ...] [--busy]   (scripts/run.sh --help lists all options)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
"$ROOT/scripts/setup.sh"
PYTHONWARNINGS=ignore exec "$PYTHON" "$ROOT/scripts/cartpole.py" "$@"
