"""Load of the machine by other processes during a measurement."""

from __future__ import annotations

import os
import time
from typing import List

#: If other processes use more cores, the machine is not quiet.
QUIET_CORES = 0.1


def busy_cores(seconds: float = 0.3) -> float:
    """Return the number of cores that are in use while this process does nothing."""
    before, begin = _idle_s(), time.perf_counter()
    time.sleep(seconds)
    cores, duration = os.cpu_count() or 1, time.perf_counter() - begin
    return max(0.0, cores - (_idle_s() - before) / duration)


def others(cores: float) -> List[str]:
    """Return the table's line about other load, if there is any."""
    if cores <= QUIET_CORES:
        return []
    return [f'  others used {cores:.1f} cores meanwhile: no figures of a quiet machine']


def _idle_s() -> float:
    """Return the seconds that all cores together were idle or waited for a disk."""
    with open('/proc/stat') as file:
        numbers = file.readline().split()
    return (int(numbers[4]) + int(numbers[5])) / os.sysconf('SC_CLK_TCK')
