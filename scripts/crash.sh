#!/usr/bin/env bash
# Kill processes that write to a buffer with a path, load into it, clear it or sample it: at 2000 random moments, and at
# every line of what is rare. Half an hour; DING_STORE_KILLS=100 DING_STORE_LINES=20 (every twentieth line) are minutes.
# Then cut the power in a model of a disk, with DING_STORE_MIXTURES=30 mixtures of old and new pages for each moment.
# Says after every 50 kills how far it is. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export DING_STORE_KILLS="${DING_STORE_KILLS:-2000}" DING_STORE_LINES="${DING_STORE_LINES:-1}"
export DING_STORE_MIXTURES="${DING_STORE_MIXTURES:-30}"
exec scripts/test.sh -s --timeout 3600 tests/buffer/test_durable*.py tests/buffer/test_{clear,load,packed,ragged}_crash.py \
    tests/buffer/test_{power_cuts,kinds_of_numbers}.py "$@"
