"""Files of objects that are gone. The next objects use their pages again, since fresh ones take longer than the copy.

A reader may use an object after it was deleted, without a lock. So its file must not change before the last mapping of
it ends. The kernel counts the openings and mappings of a file, also those of forked children. It grants a *write lease*
only if there is none. So a file gets here in this order:

1. It loses the object's name, under the lock of the host's state. From now on, no process finds it.
2. The kernel grants a lease. Otherwise the file is removed, and its memory is freed with the last mapping.
3. Its size is noted in one of a few words of the state. Only then may another object use it.

A reader may have looked up the name before 1, and open the file after 2. So a reader looks at the name again after it
has opened the file. If the name shows another file or none, the reader has read nothing yet, and the object is gone.

A process that is killed between these steps leaves a file whose word is 0. No object uses that, and the next listing,
or the next file with this number, removes it. All changes are made under the lock of the state. Only a process that
finds the file system full removes free files without it: a file that vanished is as good as none.
"""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import suppress
from typing import Iterable, Iterator, Optional

from ding_store import private_files
from ding_store.storage.objects.host_state import FREED, NUM_FREE, HostState
from ding_store.storage.objects.object_file import footprint, in_huge_pages, pages
from ding_store.storage.shared_memory.cache_files import FREE_FILE
from ding_store.storage.shared_memory.mapped_files import OwnerLock

#: Files of smaller objects are removed: that and new pages take no longer than the calls here.
_FROM_BYTES = 256 << 10
#: Share of an object's bytes that its file may have beyond what it needs.
_SPARE = 8
#: Share of the objects' bytes that free files may have, and the limit of it.
_SHARE, _MAX_BYTES = 8, 256 << 20


def may_be_kept(num_bytes: int) -> bool:
    """Return whether a file of this size is large enough for another object."""
    return pages(num_bytes) >= _FROM_BYTES


class FreeFiles:
    """
    Overview:
        The free files of a run on this host. The caller of each method holds the lock of the state.
    Arguments:
        - directory (:obj:`str`): The objects' directory.
        - max_bytes (:obj:`int`): Limit of the objects and free files together.
    """

    def __init__(self, directory: str, state: HostState, max_bytes: int) -> None:
        self._directory = directory
        self._state = state
        self._max_bytes = min(max_bytes // _SHARE, _MAX_BYTES)

    @property
    def num_bytes(self) -> int:
        return sum(self._state.free)

    def keep(self, path: str, num_bytes: int, held: Optional[OwnerLock] = None) -> None:
        """
        Overview:
            Remove an object's file, or keep it for another object if no process uses it.
        Arguments:
            - held (:obj:`Optional[OwnerLock]`): The caller's lock of the file, which this closes in time.
        """
        if not may_be_kept(num_bytes) or num_bytes > self._max_bytes:
            os.unlink(path)
            return
        number = self._state[FREED] % NUM_FREE
        self._state[FREED] += 1
        self._state.free[number] = 0
        os.rename(path, self._path(number))  # It replaces the oldest free file.
        if held is not None:
            held.close()
        if not is_unused(self._path(number)):
            self._removed(number)
            return
        self._state.free[number] = num_bytes
        self.shrink(self._max_bytes)

    def find(self, num_bytes: int) -> Optional[int]:
        """
        Return the number of a file for an object of ``num_bytes``, or None if none has a suitable size. It is the
        newest one: processors have it in their caches.
        """
        needed = footprint(num_bytes)
        if not may_be_kept(needed):
            return None
        limit = max(needed + needed // _SPARE, in_huge_pages(num_bytes))
        fitting = [number for number in self._oldest_first() if needed <= self._state.free[number] <= limit]
        return fitting[-1] if fitting else None

    def size_of(self, number: int) -> int:
        return self._state.free[number]

    def take(self, number: int, path: str) -> Optional[OwnerLock]:
        """Move a file to ``path``, and lock it. None: it vanished, or a process looks at it."""
        self._state.free[number] = 0
        try:
            os.rename(self._path(number), path)
            held = OwnerLock(private_files.opener(path, os.O_RDWR))
            fcntl.flock(held.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return held
        except FileNotFoundError:
            return None
        except BlockingIOError:
            os.unlink(path)
            return None

    def shrink(self, max_bytes: int) -> int:
        """Remove the oldest files until they have ``max_bytes``. Return how many bytes went."""
        before = left = self.num_bytes
        for number in self._oldest_first() if left > max_bytes else ():
            left -= self._removed(number)
            if left <= max_bytes:
                break
        return before - left

    def sweep(self, names: Iterable[str]) -> None:
        """Remove files that killed processes left, from the names in the directory."""
        there = set(names)
        for number in range(NUM_FREE):
            name = f'{FREE_FILE}{number}'
            if bool(self._state.free[number]) != (name in there):
                self._removed(number)

    def _path(self, number: int) -> str:
        return os.path.join(self._directory, f'{FREE_FILE}{number}')

    def _oldest_first(self) -> Iterator[int]:
        first = self._state[FREED]
        for number in range(first, first + NUM_FREE):
            if self._state.free[number % NUM_FREE]:
                yield number % NUM_FREE

    def _removed(self, number: int) -> int:
        num_bytes = self._state.free[number]
        self._state.free[number] = 0
        with suppress(FileNotFoundError):
            os.unlink(self._path(number))
        return num_bytes


def is_unused(path: str) -> bool:
    """
    Overview:
        Return whether no process of this host has a file open or mapped. False as well if the kernel cannot tell.
    """
    held: Optional[OwnerLock] = None
    try:
        held = OwnerLock(private_files.opener(path))
        # If a process opens the file just now, the kernel signals that to the holder of the lease. SIGIO would end it.
        fcntl.fcntl(held.descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(held.descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(held.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)  # A forked child may have a copy.
        return True
    except OSError:
        return False
    finally:
        if held is not None:
            held.close()
