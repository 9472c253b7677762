"""What else a machine does while we measure on it."""

from __future__ import annotations

import os
import time
from typing import List

#: Above this many cores, figures are not those of a quiet machine.
QUIET_CORES = 0.1


def busy_cores(seconds: float = 0.3) -> float:
    """How many cores are in use while this process does nothing."""
    before, begin = _idle_s(), time.perf_counter()
    time.sleep(seconds)
    cores, duration = os.cpu_count() or 1, time.perf_counter() - begin
    return max(0.0, cores - (_idle_s() - before) / duration)


def others(cores: float) -> List[str]:
    """The line of a table that says so."""
    if cores <= QUIET_CORES:
        return []
    return [f'  others used {cores:.1f} cores meanwhile: no figures of a quiet machine']


def _idle_s() -> float:
    """Seconds that all cores together had nothing to do, but for a disk."""
    with open('/proc/stat') as file:
        numbers = file.readline().split()
    return (int(numbers[4]) + int(numbers[5])) / os.sysconf('SC_CLK_TCK')
