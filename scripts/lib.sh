# Sourced by the other scripts: where the checkout and its environment are, and a shell that no other Python leaks into.
# Afterwards: ROOT, VENV and PYTHON are absolute paths.

# Someone else's active environment must neither be used nor changed.
for dir in ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin"} ${CONDA_PREFIX:+"$CONDA_PREFIX/bin"}; do
    PATH=":$PATH:"
    PATH="${PATH//":$dir:"/:}"
    PATH="${PATH#:}"
    PATH="${PATH%:}"
done
unset dir VIRTUAL_ENV CONDA_PREFIX PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PATH PYTHONNOUSERSITE=1

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="${DING_STORE_VENV:-$ROOT/.venv}"
[[ $VENV == /* ]] || VENV="$PWD/$VENV"
# The scripts call each other from other directories, where a relative path would mean another place.
[[ -z ${DING_STORE_VENV:-} ]] || export DING_STORE_VENV="$VENV"
PYTHON="$VENV/bin/python"
