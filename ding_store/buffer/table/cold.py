"""
Direct reads of rows of tables that are larger than memory, past the page cache.

A page fault through the mapping costs the kernel more work than the disk: about 0.7 of a core at 1 to 2 GB/s. It also
evicts another page that is needed later. With direct reads the page cache keeps the newest rows instead, and these are
copied from it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections import deque
from concurrent.futures import wait
from typing import Callable, Deque, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ding_store.buffer.array_types import Array, anonymous
from ding_store.buffer.thread_pool import Threads

#: Copies a row to its destination. Receives its position among the requested slots, and the row.
Put = Callable[[int, Array], None]

#: Number of rows read concurrently, and upper limit of their copies in bytes. A single thread would wait for the
#: latency of each row. Four threads keep a disk busy, while the others copy what they read.
_NUM_THREADS = 6
_BOUNCE_BYTES = 256 << 20
#: The alignment of direct reads. It is right for all file systems that support them.
_PAGE = mmap.PAGESIZE

_C = ctypes.CDLL(None, use_errno=True)
_C.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

_scratch = threading.local()
_threads = Threads(_NUM_THREADS, 'ding-store-disk')


class ColdRow(NamedTuple):
    """
    A requested row: its column, destination, position and slot, and for each page that it touches whether it is cached.
    """

    column: ColdColumn
    put: Put
    place: int
    slot: int
    held: Array


class ColdRead(NamedTuple):
    """A request for rows of a column, and the function that receives each row."""

    column: ColdColumn
    slots: Array
    put: Put


class ColdColumn:
    """
    Overview:
        A column file whose rows are read from the page cache if they are in it. Otherwise they are read from the disk,
        and the cache does not keep them.
    Arguments:
        - column (:obj:`np.ndarray`): The mapped file, ``(capacity, *shape)``.
        - descriptor (:obj:`int`): The descriptor of the file.
    Raises:
        - OSError: The file system has no direct reads.
    """

    def __init__(self, column: Array, descriptor: int) -> None:
        self.column = column
        self._bytes = column.reshape(-1).view(np.uint8)
        self.row_bytes = column[:1].nbytes
        # Open it by its descriptor: a private file has no name.
        self._file = os.open(f'/proc/self/fd/{descriptor}', os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        # Do not close it with the table: another thread may be reading.
        weakref.finalize(self, os.close, self._file)
        #: Approximate number of reads that found rows missing from memory. Threads count without a lock.
        self.num_misses = 0

    def each(self, slots: Array, put: Put) -> None:
        """Call ``put`` for each row, see ``read_cold``."""
        read_cold([ColdRead(self, slots, put)])

    def divided(self, slots: Array, put: Put) -> Tuple[List[ColdRow], List[ColdRow]]:
        """Split the rows into those that are all in memory, and the others."""
        held: List[ColdRow] = []
        missing: List[ColdRow] = []
        for place, slot in enumerate(np.minimum(slots, len(self.column) - 1).tolist()):
            pages = self._held(slot)
            (held if pages.all() else missing).append(ColdRow(self, put, place, slot, pages))
        self.num_misses += bool(missing)
        return held, missing

    def _held(self, slot: int) -> Array:
        """Return for each page that a row touches whether it is in memory."""
        first, end = self._pages(slot)
        states = np.empty(end - first, np.uint8)
        size = min(end * _PAGE, self._bytes.nbytes) - first * _PAGE
        if _C.mincore(self._bytes.ctypes.data + first * _PAGE, size, states.ctypes.data):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return (states & 1).astype(bool)

    def _pages(self, slot: int) -> Tuple[int, int]:
        begin = slot * self.row_bytes
        return begin // _PAGE, -(-(begin + self.row_bytes) // _PAGE)

    def read(self, row: ColdRow) -> Array:
        """Read a row from the disk. The result is valid until the next call in this thread."""
        first, end = self._pages(row.slot)
        bounce = _bounce((end - first) * _PAGE)
        missing = np.flatnonzero(~row.held)
        self._read_pages(bounce, first, int(missing[0]), int(missing[-1]) + 1)
        begin = row.slot * self.row_bytes - first * _PAGE
        stop = begin + self.row_bytes
        # Pages in memory may be newer than the disk.
        runs = np.flatnonzero(np.diff(row.held, prepend=False, append=False)).reshape(-1, 2) * _PAGE
        for run_begin, run_stop in np.clip(runs, begin, stop).tolist():
            bounce[run_begin:run_stop] = self._bytes[first * _PAGE + run_begin : first * _PAGE + run_stop]
        read: Array = bounce[begin:stop].view(self.column.dtype).reshape(self.column.shape[1:])
        return read

    def _read_pages(self, bounce: Array, first: int, start: int, stop: int) -> None:
        """Read pages ``start`` to ``stop`` of a row, counted from its page ``first``, up to the end of the file."""
        place, end = start * _PAGE, min(stop * _PAGE, self._bytes.nbytes - first * _PAGE)
        while place < end:
            num_read = os.preadv(self._file, [bounce[place : stop * _PAGE].data], first * _PAGE + place)
            if num_read == 0:
                raise OSError(errno.EIO, f'the file of a column of a table ends at byte {first * _PAGE + place}')
            place += num_read


def read_cold(reads: Sequence[ColdRead]) -> None:
    """
    Overview:
        Call each ``put`` for all slots of its column, in any order and from several threads. A row is valid only during
        the call. The disk reads rows of all columns concurrently. It does not wait for one column to finish, or for the
        rows that are copied from memory.
    Raises:
        - OSError: The disk could not read.
    """
    divided = [read.column.divided(read.slots, read.put) for read in reads]
    held = [row for rows, _ in divided for row in rows]
    missing = deque(row for _, rows in divided for row in rows)
    row_bytes = max((row.column.row_bytes for row in missing), default=1)
    num_threads = min(_NUM_THREADS, len(missing), max(1, _BOUNCE_BYTES // row_bytes))
    if num_threads == 1 and not held:
        _read_all(missing)
        return
    parts = [_threads.submit(_read_all, missing) for _ in range(num_threads)]
    try:
        for row in held:
            row.put(row.place, row.column.column[row.slot])
    finally:
        # Wait for all threads, even if one fails: the destination of ``put`` may be reused after the return.
        wait(parts)
    for part in parts:
        part.result()


def _read_all(rows: Deque[ColdRow]) -> None:
    """Read rows from the shared queue until it is empty."""
    while True:
        try:
            row = rows.popleft()
        except IndexError:
            return
        row.put(row.place, row.column.read(row))


def _bounce(size: int) -> Array:
    """Return page-aligned memory of this thread, of at least ``size`` bytes."""
    found: Optional[Array] = getattr(_scratch, 'bounce', None)
    if found is None or len(found) < size:
        found = _scratch.bounce = np.frombuffer(anonymous(size), np.uint8)
    return found
