"""Numbers about a host's objects that its processes share, and which objects are gone.

A process changes it only while it holds the lock. If it is killed meanwhile, a number may be too high by one object.
It is counted anew whenever the directory is listed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from contextlib import contextmanager
from typing import Dict, Iterator

import numpy as np

from ding_store import private_files
from ding_store.errors import FormatMismatch, StoreTimeout
from ding_store.storage.shared_memory.mapped_files import PAGE, OwnerLock, allocate

#: Numbers by name: where they are in the first page, in words of 64 bits.
MEMORY, SPILLED, PAID_AT, BOOT = 'memory', 'spilled', 'paid_at', 'boot'
#: Number of files that were kept for other objects, see ``free_files``.
FREED = 'freed'
COUNTS = ('put', 'fetched', 'served', 'evicted', 'spilled_objects', 'not_spilled', 'deleted', 'reused')
_WORDS: Dict[str, int] = {
    name: number for number, name in enumerate(('magic', 'gone', MEMORY, SPILLED, PAID_AT, *COUNTS, BOOT, FREED))
}
_MAGIC = 0x32_424F_5344  # 'DSOB2'
#: Words of the free files: where they begin in the first page, and their number.
_FREE_AT, NUM_FREE = 64, 64

#: Why an object is gone.
DELETED, EVICTED = 1, 2
#: Number of objects of which the host remembers why they are gone.
NUM_GONE = 16384
#: The 20 bytes of a reference, why, and padding.
_RECORD = 24
_REF = 20
_FILE_BYTES = PAGE + NUM_GONE * _RECORD

_PATIENCE_S = 10.0
_MAX_PAUSE_S = 0.001


class HostState:
    """
    Overview:
        One process's mapping of the shared state. Thread-safe. It belongs to one process: a forked child opens its own.
    Arguments:
        - directory (:obj:`str`): The objects' directory.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        path = os.path.join(directory, 'state')
        self._thread_lock = threading.Lock()
        self._lock = OwnerLock(private_files.opener(os.path.join(directory, 'lock'), os.O_RDWR | os.O_CREAT))
        with self.locked():
            descriptor = private_files.opener(path, os.O_RDWR | os.O_CREAT)
            try:
                allocate(descriptor, 0, _FILE_BYTES, path)
                self._map = mmap.mmap(descriptor, _FILE_BYTES)
            finally:
                os.close(descriptor)
            self._words = memoryview(self._map)[:PAGE].cast('Q')
            #: Bytes of each free file. 0: there is none of this number.
            self.free = self._words[_FREE_AT : _FREE_AT + NUM_FREE]
            # Records of three words each.
            self._records = np.frombuffer(self._map, '<u8', NUM_GONE * _RECORD // 8, PAGE).reshape(NUM_GONE, -1)
            if self['magic'] not in (0, _MAGIC):
                raise FormatMismatch(f'{path!r} is of another version. End the processes of this run.')
            self['magic'] = _MAGIC

    @contextmanager
    def locked(self) -> Iterator[None]:
        """
        Overview:
            Hold the lock of the state within the block, for microseconds, or while the directory is listed.
        Raises:
            - StoreTimeout: Another process holds it for 10 seconds.
        """
        with self._thread_lock:
            deadline, pause_s = 0.0, 0.00002
            while True:
                try:
                    fcntl.flock(self._lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    deadline = deadline or time.monotonic() + _PATIENCE_S
                    if time.monotonic() > deadline:
                        raise StoreTimeout(
                            f'another process holds the lock of the objects in {self._directory!r}. '
                            "Continue or end this user's stopped processes."
                        ) from None
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            try:
                yield
            finally:
                fcntl.flock(self._lock.descriptor, fcntl.LOCK_UN)

    def __getitem__(self, name: str) -> int:
        return self._words[_WORDS[name]]

    def __setitem__(self, name: str, number: int) -> None:
        self._words[_WORDS[name]] = number

    def add(self, name: str, amount: int) -> None:
        """Add to a number, which stays at least 0. The caller holds the lock."""
        word = _WORDS[name]
        self._words[word] = max(0, self._words[word] + amount)

    def forget_free(self) -> None:
        """Forget the free files, which were removed. The caller holds the lock."""
        for number in range(NUM_FREE):
            self.free[number] = 0

    def note_gone(self, ref: str, why: int) -> None:
        """Remember why an object is gone. The caller holds the lock."""
        number = self['gone']
        start = PAGE + number % NUM_GONE * _RECORD
        self._map[start : start + _RECORD] = bytes.fromhex(ref) + bytes([why]) + bytes(_RECORD - _REF - 1)
        self['gone'] = number + 1

    def why_gone(self, ref: str) -> int:
        """Return why an object is gone, or 0 if this is not known (any more)."""
        wanted, found = bytes.fromhex(ref), 0
        middle = int.from_bytes(wanted[8:16], 'little')
        # mmap.find takes a hundred times as long.
        for number in np.flatnonzero(self._records[:, 1] == middle).tolist():
            record = self._records[number].tobytes()
            if record[:_REF] == wanted:
                if record[_REF] == DELETED:  # for good; an evicted copy may come again, and go again
                    return DELETED
                found = record[_REF]
        return found

    def close(self) -> None:
        self.free.release()
        self._words.release()
        del self._records  # a mapping with a view of it cannot be closed
        self._map.close()
        self._lock.close()
