#!/usr/bin/env bash
# Interrupt each operation of a buffer at many places, and fork hundreds of times while threads use buffers and stores.
# Hours with DING_STORE_PLACES=100000, which is every place. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export DING_STORE_PLACES="${DING_STORE_PLACES:-12}" DING_STORE_FORKS="${DING_STORE_FORKS:-300}"
exec scripts/test.sh --timeout 3600 tests/buffer/test_buffer_{interrupts,forks}.py tests/storage/test_store_forks.py "$@"
