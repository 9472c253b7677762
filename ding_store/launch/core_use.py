"""Measures how much processes of this host compute, and how long they wait for a core. It reads /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Optional

#: Fields of the first line of /proc/stat that are no work: idle, iowait, guest, guest_nice (both counted in user).
NO_WORK = (3, 4, 8, 9)


class Share(NamedTuple):
    """Seconds that a process computed and that it waited for a core, per second of an interval."""

    cpu: float
    wait: float


class CoreUse:
    """
    Overview:
        Measures from its creation on. ``of`` and ``host`` are of the time since.
    Arguments:
        - pids (:obj:`Iterable[int]`): Processes of this host.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._at_s, self._busy_s = time.monotonic(), _busy_s()
        self._began = {pid: _spent(pid) for pid in pids}

    def host(self) -> float:
        """Return how many cores of this host computed, for any program."""
        return (_busy_s() - self._busy_s) / self._elapsed_s()

    def of(self) -> Dict[int, Share]:
        """
        Overview:
            Return what each process did. Threads that ended meanwhile are left out. A process that waits for one core
            with two threads waits for two seconds per second.
        """
        elapsed_s, found = self._elapsed_s(), {}
        for pid, began in self._began.items():
            now = _spent(pid)
            if began is not None and now is not None:
                deltas = [
                    [(end - begin) * 1e-9 for begin, end in zip(began[task], now[task])]
                    for task in now
                    if task in began
                ]
                found[pid] = Share(*(sum(column) / elapsed_s for column in zip(*deltas))) if deltas else Share(0.0, 0.0)
        return found

    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._at_s, 1e-3)


def _busy_s() -> float:
    fields = [int(field) for field in Path('/proc/stat').read_text().split('\n', 1)[0].split()[1:]]
    return sum(field for number, field in enumerate(fields) if number not in NO_WORK) / os.sysconf('SC_CLK_TCK')


def _spent(pid: int) -> Optional[Dict[str, List[int]]]:
    """Return thread -> nanoseconds that it computed and that it waited for a core. None: it cannot be read."""
    found = {}
    try:
        for task in os.listdir(f'/proc/{pid}/task'):
            computed, waited, _ = Path(f'/proc/{pid}/task/{task}/schedstat').read_text().split()
            found[task] = [int(computed), int(waited)]
    except (OSError, ValueError):  # it has ended, or the kernel keeps no such statistics
        return None
    return found
