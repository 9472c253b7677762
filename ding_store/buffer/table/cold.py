"""
Rows of tables that are larger than memory, read from the disk past the page cache.

Through the mapping each page costs the kernel more work than the disk, some 0.7 of a core at 1 to 2 GB/s, and drives
out another page that will be missed: memory keeps the rows that came last instead, and these are copied from it.
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

#: Puts a row where it belongs: (its place among the slots asked for, the row).
Put = Callable[[int, Array], None]

#: Rows that are read at once, and what their copies may take: a single reader waits for each one's latency. Four keep a
#: disk busy, while others put what they read where it belongs.
_NUM_THREADS = 6
_BOUNCE_BYTES = 256 << 20
#: What direct reads begin at and are a multiple of, on all file systems that have them.
_PAGE = mmap.PAGESIZE

_C = ctypes.CDLL(None, use_errno=True)
_C.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

_scratch = threading.local()
_threads = Threads(_NUM_THREADS, 'ding-store-disk')


class ColdRow(NamedTuple):
    """A row of a column, where it goes, its slot, and which of the pages that it touches memory has."""

    column: ColdColumn
    put: Put
    place: int
    slot: int
    held: Array


class ColdRead(NamedTuple):
    """Rows of a column that are wanted, and what takes them."""

    column: ColdColumn
    slots: Array
    put: Put


class ColdColumn:
    """
    Overview:
        The rows of a column file, each from memory if that has it, else from the disk, without memory keeping it.
    Arguments:
        - column (:obj:`np.ndarray`): The file as it is mapped, ``(capacity, *shape)``.
        - descriptor (:obj:`int`): Of the file.
    Raises:
        - OSError: The file system has no direct reads.
    """

    def __init__(self, column: Array, descriptor: int) -> None:
        self.column = column
        self._bytes = column.reshape(-1).view(np.uint8)
        self.row_bytes = column[:1].nbytes
        # By its number: a private file has no name.
        self._file = os.open(f'/proc/self/fd/{descriptor}', os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        # Not closed with the table: another thread may be reading.
        weakref.finalize(self, os.close, self._file)
        #: How many reads found rows missing, more or less: threads do not wait for each other to count.
        self.num_misses = 0

    def each(self, slots: Array, put: Put) -> None:
        """As ``read_cold`` of this column alone."""
        read_cold([ColdRead(self, slots, put)])

    def divided(self, slots: Array, put: Put) -> Tuple[List[ColdRow], List[ColdRow]]:
        """Rows that are all in memory, and those that are not."""
        held: List[ColdRow] = []
        missing: List[ColdRow] = []
        for place, slot in enumerate(np.minimum(slots, len(self.column) - 1).tolist()):
            pages = self._held(slot)
            (held if pages.all() else missing).append(ColdRow(self, put, place, slot, pages))
        self.num_misses += bool(missing)
        return held, missing

    def _held(self, slot: int) -> Array:
        """Which of the pages that a row touches are in memory."""
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
        """From the disk; valid until this thread's next one."""
        first, end = self._pages(row.slot)
        bounce = _bounce((end - first) * _PAGE)
        missing = np.flatnonzero(~row.held)
        self._read_pages(bounce, first, int(missing[0]), int(missing[-1]) + 1)
        begin = row.slot * self.row_bytes - first * _PAGE
        stop = begin + self.row_bytes
        # What memory holds may be newer than the disk.
        runs = np.flatnonzero(np.diff(row.held, prepend=False, append=False)).reshape(-1, 2) * _PAGE
        for run_begin, run_stop in np.clip(runs, begin, stop).tolist():
            bounce[run_begin:run_stop] = self._bytes[first * _PAGE + run_begin : first * _PAGE + run_stop]
        read: Array = bounce[begin:stop].view(self.column.dtype).reshape(self.column.shape[1:])
        return read

    def _read_pages(self, bounce: Array, first: int, start: int, stop: int) -> None:
        """Pages of a row, counted from its first, up to the file's end."""
        place, end = start * _PAGE, min(stop * _PAGE, self._bytes.nbytes - first * _PAGE)
        while place < end:
            num_read = os.preadv(self._file, [bounce[place : stop * _PAGE].data], first * _PAGE + place)
            if num_read == 0:
                raise OSError(errno.EIO, f'the file of a column of a table ends at byte {first * _PAGE + place}')
            place += num_read


def read_cold(reads: Sequence[ColdRead]) -> None:
    """
    Overview:
        Call each ``put`` for all slots of its column, in any order and from several threads; a row is valid in the call
        only. The disk reads rows of all columns meanwhile: it would wait for the last of one before the first of the
        next otherwise, and for what is made of those that memory has.
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
        # For all of them, also when one fails: what ``put`` writes to is somebody else's soon.
        wait(parts)
    for part in parts:
        part.result()


def _read_all(rows: Deque[ColdRow]) -> None:
    """Those that no other thread takes."""
    while True:
        try:
            row = rows.popleft()
        except IndexError:
            return
        row.put(row.place, row.column.read(row))


def _bounce(size: int) -> Array:
    """Memory of this thread, at a page's begin, at least so large."""
    found: Optional[Array] = getattr(_scratch, 'bounce', None)
    if found is None or len(found) < size:
        found = _scratch.bounce = np.frombuffer(anonymous(size), np.uint8)
    return found
