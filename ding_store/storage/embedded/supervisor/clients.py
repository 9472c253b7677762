"""The processes that use the server. A client stays one until it leaves, exits or crashes."""

from __future__ import annotations

import os
import selectors
import sys
from typing import Callable, Dict, List, Optional

#: Interval of checks without pidfd_open: on Linux < 5.3, in old containers, in some Pythons.
LOOK_EVERY_S = 1.0


class Clients:
    """
    Overview:
        Watches processes through pidfds in the given selector. A forked child is a client only if it joins itself.
    Arguments:
        - gone (:obj:`Callable`): Called with the process id of each client that has exited.
        - max_pidfds (:obj:`int`): Maximum number of pidfds. Further clients are checked every ``LOOK_EVERY_S``.
    """

    def __init__(
        self, selector: selectors.BaseSelector, gone: Callable[[int], None], max_pidfds: int = sys.maxsize
    ) -> None:
        self._selector = selector
        self._gone = gone
        self._max_pidfds = max_pidfds
        self._pidfds: Dict[int, int] = {}
        self._births: Dict[int, str] = {}  # start time of clients without a pidfd: ids are used again

    def __len__(self) -> int:
        return len(self._pidfds) + len(self._births)

    def __contains__(self, pid: int) -> bool:
        return pid in self._pidfds or pid in self._births

    def pids(self) -> List[int]:
        return sorted([*self._pidfds, *self._births])

    def join(self, pid: int) -> None:
        """Add a process. Raise ProcessLookupError if there is none with this id."""
        self.leave(pid)  # An earlier client with this id has exited, which may not be handled yet.
        pidfd = _open_pidfd(pid) if len(self._pidfds) < self._max_pidfds else None
        if pidfd is None:
            self._births[pid] = birth_of(pid)
            return
        self._pidfds[pid] = pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, lambda _: self._died(pid))

    def leave(self, pid: int) -> None:
        self._births.pop(pid, None)
        pidfd = self._pidfds.pop(pid, None)
        if pidfd is not None:
            self._selector.unregister(pidfd)
            os.close(pidfd)

    @property
    def look_every_s(self) -> Optional[float]:
        """Interval in which look() must be called. None if the selector reports every exit."""
        return LOOK_EVERY_S if self._births else None

    def look(self) -> None:
        for pid, birth in list(self._births.items()):
            if is_gone(pid, birth):
                self._died(pid)

    def _died(self, pid: int) -> None:
        self.leave(pid)
        self._gone(pid)


def _open_pidfd(pid: int) -> Optional[int]:
    try:
        return os.pidfd_open(pid)
    except AttributeError:  # a Python built on an old kernel's headers
        return None
    except ProcessLookupError:
        raise
    except OSError:  # ENOSYS or EPERM: the kernel or its sandbox does not offer pidfds
        return None


def birth_of(pid: int) -> str:
    """
    Return a process's start time, which distinguishes it from a later process with its id. Raise ProcessLookupError if
    it has exited, and OSError if its state cannot be read.
    """
    try:
        with open(f'/proc/{pid}/stat') as file:
            # The name in parentheses may contain spaces. State is the 1st and start time the 20th field after it.
            fields = file.read().rpartition(')')[2].split()
    except (FileNotFoundError, ProcessLookupError) as e:
        raise ProcessLookupError(f'no process {pid}') from e
    if fields[0] in 'ZX':
        raise ProcessLookupError(f'process {pid} has ended')
    return fields[19]


def is_gone(pid: int, birth: str) -> bool:
    try:
        return birth_of(pid) != birth
    except ProcessLookupError:
        return True
    except OSError:  # There is no free descriptor at the moment.
        return False
