#!/usr/bin/env bash
# Lint, format and types. All three run, whichever fails.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

"$ROOT/scripts/setup.sh" --test
cd "$ROOT"
status=0
"$VENV/bin/ruff" check . || status=1
"$VENV/bin/ruff" format --check . || status=1
# What mypy finds can depend on the order of its sets (how a lambda and a method are joined did): the same one everywhere.
PYTHONHASHSEED=0 "$VENV/bin/mypy" || status=1
exit "$status"
