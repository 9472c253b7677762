#!/usr/bin/env bash
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
    cat <<'TEXT'
Usage: scripts/setup.sh [--test] [--extra NAME]...

Make the environment of this checkout: Python with torch, DI-engine 0.5.3 and ding_store, in .venv. Run again, it
returns at once when nothing changed, and goes on where it was interrupted.

  --test         also what the tests and the linters need
  --extra NAME   also this extra of setup.py, and requirements/no-deps/NAME.txt where that is; may be repeated
  --help         this text

DING_STORE_VENV=DIR        the environment's directory instead of .venv
DING_STORE_PYTHON=COMMAND  the Python (3.10 or 3.11) to make it from
torch comes from whatever package index pip is configured with; its CPU build is enough for the CartPole job.
TEXT
}

die() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

say() { printf 'setup: %s\n' "$*"; }

MARKER="$VENV/.ding_store_env" # holds the path that the environment was made for
STAMP="$VENV/.ding_store_stamp" # holds what is installed; written last, removed first
LOG="$VENV/setup.log"
LOCK_TIMEOUT_S=1800

EXTRAS=(fast)
parse_arguments() {
    while (($#)); do
        case "$1" in
            --test) EXTRAS+=(test) ;;
            --extra)
                (($# >= 2)) || die '--extra needs a name, for example: --extra test'
                check_extra "$2"
                EXTRAS+=("$2")
                shift
                ;;
            --extra=*)
                check_extra "${1#*=}"
                EXTRAS+=("${1#*=}")
                ;;
            -h | --help)
                usage
                exit 0
                ;;
            *) die "unknown argument '$1'; scripts/setup.sh --help lists the known ones" ;;
        esac
        shift
    done
}

known_extras() { sed -nE "s/^    '([a-z0-9_-]+)': \[.*/\1/p" "$ROOT/setup.py"; }

check_extra() {
    known_extras | grep -qxF -- "$1" || die "unknown extra '$1'; setup.py has: $(known_extras | tr '\n' ' ')"
}

# --- the state of the environment -----------------------------------------------------------------------------------

# A server on PATH that is new enough (6.2) makes the one in the `embedded` extra's wheel unnecessary.
has_server() {
    local server version
    for server in redis-server valkey-server; do
        version="$("$server" --version 2>/dev/null | sed -nE 's/.* v=([0-9]+)\.([0-9]+).*/\1 \2/p')" || continue
        [[ -n $version ]] || continue
        if ((${version% *} > 6 || (${version% *} == 6 && ${version#* } >= 2))); then return 0; fi
    done
    return 1
}

fingerprint() {
    {
        printf '%s\n' "$ROOT"
        find "$ROOT/requirements" -name '*.txt' -print0 | sort -z | xargs -0 cat
        cat "$ROOT/setup.py" "$ROOT/scripts/setup.sh" "$VENV/pyvenv.cfg"
    } | sha256sum | cut -d' ' -f1
}

installed_extras() { if [[ -f $STAMP ]]; then tail -n +2 "$STAMP"; fi; }

is_current() {
    [[ -f $STAMP && -x $PYTHON && "$(head -n 1 "$STAMP")" == "$(fingerprint)" ]] || return 1
    local extra
    for extra in "${EXTRAS[@]}"; do
        installed_extras | grep -qxF -- "$extra" || return 1
    done
}

is_empty() { [[ -z "$(ls -A "$VENV")" ]]; }

refuse_foreign() {
    [[ -e $VENV || -L $VENV ]] || return 0
    [[ -d $VENV ]] || die "$VENV is in the way: it is no directory. Remove it, or set DING_STORE_VENV to another path."
    [[ -f $MARKER ]] || is_empty ||
        die "$VENV was not made by this script, so it is left alone." \
            "Remove it, or set DING_STORE_VENV to the path of another environment."
    # A copy inside of a copied checkout is ours; one elsewhere is somebody's, who would lose it under their feet.
    local owner
    owner="$(cat "$MARKER" 2>/dev/null)" || return 0
    [[ $owner == "$ROOT" || $VENV == "$ROOT"/* || ! -f $owner/scripts/setup.sh ]] ||
        die "$VENV is the environment of the checkout $owner." 'Set DING_STORE_VENV to another path.'
}

# The lock is the directory itself: it leaves nothing behind, and ends with the last process that holds it.
lock() {
    mkdir -p "$VENV"
    exec 9<"$VENV"
    flock --nonblock 9 && return
    say 'another setup of this environment is running; waiting for it'
    flock --timeout "$LOCK_TIMEOUT_S" 9 || die "another setup held $VENV for $LOCK_TIMEOUT_S s; end it and start again"
}

# --- making it ------------------------------------------------------------------------------------------------------

# torch 2.13 needs Python 3.10, DI-engine 0.5.3 is known to run up to 3.11.
is_suitable() { "$1" -I -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${DING_STORE_PYTHON:-python3.11 python3 python3.10}; do
        if is_suitable "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python 3.10 or 3.11 found (looked for: ${DING_STORE_PYTHON:-python3.11, python3, python3.10})." \
        'Debian 12: apt-get install python3 python3-venv' \
        'Elsewhere: install Python 3.11 and name it: DING_STORE_PYTHON=/path/to/python3.11 scripts/setup.sh'
}

find_maker() {
    local python
    python="$(find_python)"
    "$python" -I -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python cannot make environments: its venv or ensurepip module is missing." \
            'Fix: apt-get install python3-venv (for a python3.X beside it: python3.X-venv)'
    printf '%s\n' "$python"
}

make_environment() {
    local python
    python="$(find_maker)"
    say "making $VENV with $("$python" -I --version)"
    find "$VENV" -mindepth 1 -delete
    # First, so that an interrupted beginning is known as ours.
    printf '%s\n' "$ROOT" >"$MARKER"
    "$python" -I -m venv "$VENV" || die "$python -m venv $VENV failed; its message is above"
}

is_usable() {
    # Scripts in an environment hold its path: one that was copied or moved with its checkout is made again.
    [[ "$(cat "$MARKER" 2>/dev/null)" == "$ROOT" ]] && "$PYTHON" -m pip --version >/dev/null 2>&1
}

# The pins were made with Python 3.11; on another one pip has to find versions of its own.
constraints() {
    if "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        printf '%s\n' -c "$ROOT/requirements/constraints.txt"
    fi
}

install() {
    local title="$1" start=$SECONDS
    shift
    say "$title"
    # Only what takes long is shown while it runs; everything is shown when it failed.
    if ! "$PYTHON" -m pip install --disable-pip-version-check --no-input "${CONSTRAINTS[@]}" 'numpy<2' "$@" 2>&1 |
        tee "$LOG" | sed -nuE 's/^ *(Downloading .*\([0-9.]+ [MG]B\)|Installing collected packages).*/setup:   \1/p'; then
        cat "$LOG" >&2
        die "that failed; pip's messages are above and in $LOG"
    fi
    say "  done in $((SECONDS - start)) s"
}

install_all() {
    local list
    mapfile -t CONSTRAINTS < <(constraints)
    # DI-engine's own pins cannot be met beside this torch: see requirements/di-engine.txt.
    install '1/3 what DI-engine needs (a few minutes the first time)' -r "$ROOT/requirements/di-engine.txt"
    install '2/3 DI-engine' --no-deps 'DI-engine==0.5.3'
    list="$(IFS=,; echo "${EXTRAS[*]}")"
    install "3/3 ding_store[$list]" -e "$ROOT[$list]"
    install_without_dependencies
    find_the_pipelines
    compile_loops
}

# Otherwise the first run compiles them. It also reads the files of torch and DI-engine from the disk.
compile_loops() {
    local start=$SECONDS
    say 'compiling loops'
    if "$PYTHON" -c 'from ding_store.launch.user_script import compile_loops; compile_loops()' >>"$LOG" 2>&1; then
        say "  done in $((SECONDS - start)) s"
    else
        say "  that failed, so the first run compiles them; messages are in $LOG"
    fi
}

# dizoo_configs is no part of the package: `python dizoo_configs/...` finds it in the checkout.
find_the_pipelines() {
    local site
    for site in "$VENV"/lib/python3*/site-packages; do
        printf '%s\n' "$ROOT" >"$site/ding_store_checkout.pth"
    done
}

# Packages whose own requirements contradict DI-engine's: what they really need is in the extra, they come by themselves.
install_without_dependencies() {
    local extra file
    for extra in "${EXTRAS[@]}"; do
        file="$ROOT/requirements/no-deps/$extra.txt"
        [[ ! -f $file ]] || install "    and by themselves, for $extra: $(grep -v '^#' "$file" | paste -sd' ')" --no-deps -r "$file"
    done
}

main() {
    parse_arguments "$@"
    has_server || EXTRAS+=(embedded)
    refuse_foreign
    is_current && return
    # Before the directory is made, so that a machine without such a Python is left as it was.
    [[ -f $MARKER ]] || find_maker >/dev/null
    lock
    refuse_foreign
    is_current && return # someone else's setup has just done it
    mapfile -t EXTRAS < <(printf '%s\n' "${EXTRAS[@]}" $(installed_extras) | sort -u)
    rm -f "$STAMP"
    is_usable || make_environment
    install_all
    printf '%s\n' "$(fingerprint)" "${EXTRAS[@]}" >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    say "ready: $VENV"
}

main "$@"
