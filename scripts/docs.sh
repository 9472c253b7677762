#!/usr/bin/env bash
# Builds the documentation's site. Usage: scripts/docs.sh [DIR] [options of sphinx-build]   (DIR: build/docs)
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
"$ROOT/scripts/setup.sh" --extra docs
out="$ROOT/build/docs"
if (($#)) && [[ $1 != -* ]]; then
    out="$1"
    shift
fi
cd "$ROOT"
# Warnings are errors: a broken link, a page that no index lists, a docstring that cannot be read.
"$PYTHON" -m sphinx -W --keep-going -q -c docs -d "$out/.doctrees" "$@" . "$out"
cp docs/index.html "$out/index.html"
echo "The site begins at $out/index.html"
