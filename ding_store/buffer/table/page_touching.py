"""
Pages of a private table that will be written soon, touched by a thread: the kernel's part of a first touch, and on a
virtual machine the host's, takes longer than the copy into them, up to thirty times as long.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Iterable, Optional

from ding_store.buffer.array_types import Array
from ding_store.buffer.thread_pool import Threads

#: Linux 5.14. It writes nothing, and where there is no room it is an error and no signal.
_MADV_POPULATE_WRITE = 23
#: Between two looks at whether it should end. The first touch of so much took 0.5 to 16 ms.
_STEP_BYTES = 4 << 20
#: How long ``stop`` waits.
_STOP_S = 1.0

_C = ctypes.CDLL(None, use_errno=True)
_C.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_threads = Threads(1, 'ding-store-pages')


class Toucher:
    """The pages of one table."""

    def __init__(self) -> None:
        self._future: Optional[Future[None]] = None
        self._process = os.getpid()
        self._is_stopped = False
        #: False when this kernel cannot.
        self.is_able = True

    def touch(self, columns: Iterable[Array], start: int, stop: int) -> None:
        """Begin to touch these slots, unless others are still being touched."""
        self._forget_parents()
        if start >= stop or not self.is_able or (self._future is not None and not self._future.done()):
            return
        self._is_stopped = False
        # Without a thread whoever writes touches them, as ever.
        with suppress(RuntimeError):
            self._future = _threads.submit(self._touch, list(columns), start, stop)

    def stop(self) -> None:
        """Touch nothing from now on: of pages that are given back, or counted."""
        self._is_stopped = True
        self._forget_parents()
        if self._future is not None:
            wait([self._future], _STOP_S)

    def _forget_parents(self) -> None:
        """A forked process has none of its parent's threads."""
        if self._process != os.getpid():
            self._process, self._future = os.getpid(), None

    def _touch(self, columns: Iterable[Array], start: int, stop: int) -> None:
        for column in columns:
            rows = column[start:stop]
            begin = rows.ctypes.data
            # Only pages that are wholly of these slots: the others are being written.
            place = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (begin + rows.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            while place < end and not self._is_stopped:
                size = min(_STEP_BYTES, end - place)
                if _C.madvise(place, size, _MADV_POPULATE_WRITE):
                    self.is_able = False
                    return
                place += size
