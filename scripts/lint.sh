#!/usr/bin/env bash
# Lint, format and types. All three run, whichever fails.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

"$ROOT/scripts/setup.sh" --test
cd "$ROOT"
status=0
"$VENV/bin/ruff" check . || status=1
"$VENV/bin/ruff" format --check . || status=1
"$VENV/bin/mypy" || status=1
exit "$status"
