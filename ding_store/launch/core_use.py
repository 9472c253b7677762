"""Measures how much processes of this host compute, and how long they wait for a core. It reads /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Dict, Iterable, Iterator, NamedTuple, Tuple

#: Fields of a line of /proc/stat that are no work here: idle, iowait, steal, and guests, which user has already.
NO_WORK = (3, 4, 7, 8, 9)


class Share(NamedTuple):
    """Seconds that a process and its children computed, and that their busiest thread waited for a core, per second."""

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
        """Return how many of the cores that this process may use computed, for any program."""
        return (_busy_s() - self._busy_s) / self._elapsed_s()

    def of(self) -> Dict[int, Share]:
        """Return what each process and its children did. Threads that began or ended meanwhile are left out."""
        elapsed_s, found = self._elapsed_s(), {}
        for pid, began in self._began.items():
            now = _spent(pid)
            deltas = [[end - begin for begin, end in zip(began[task], now[task])] for task in now if task in began]
            if deltas:
                computed, waited = zip(*deltas)
                found[pid] = Share(1e-9 * sum(computed) / elapsed_s, 1e-9 * max(waited) / elapsed_s)
        return found

    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._at_s, 1e-3)


def _busy_s() -> float:
    """Return the seconds that the cores of this process have computed since the start of the host."""
    names = {f'cpu{core}' for core in os.sched_getaffinity(0)}
    lines = (line.split() for line in Path('/proc/stat').read_text().splitlines())
    fields = [field for name, *fields in lines if name in names for field in enumerate(fields)]
    return sum(int(field) for number, field in fields if number not in NO_WORK) / os.sysconf('SC_CLK_TCK')


def _spent(pid: int) -> Dict[str, Tuple[int, int]]:
    """Return thread -> nanoseconds that it computed and that it waited for a core, of a process and its children."""
    found = {}
    for directory in _threads(pid):
        try:
            computed, waited, _ = (directory / 'schedstat').read_text().split()
            found[str(directory)] = int(computed), int(waited)
        except (OSError, ValueError):  # it has ended, or the kernel keeps no such statistics
            pass
    return found


def _threads(pid: int) -> Iterator[Path]:
    try:
        threads = list(Path(f'/proc/{pid}/task').iterdir())
    except OSError:
        return
    for thread in threads:
        yield thread
        try:
            children = (thread / 'children').read_text().split()
        except OSError:  # it has ended, or the kernel does not list children
            continue
        for child in children:
            yield from _threads(int(child))
