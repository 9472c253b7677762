"""
A thread that touches pages of a private table shortly before they are written. The first touch of a page takes up to
thirty times as long as the copy into it. The time goes to the kernel, and to the host of a virtual machine.
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

#: Needs Linux 5.14. It changes no bytes. If there is no space, it returns an error and sends no signal.
_MADV_POPULATE_WRITE = 23
#: Bytes touched between two checks of the stop flag. The first touch of that many bytes took 0.5 to 16 ms.
_STEP_BYTES = 4 << 20
#: Longest wait in ``stop``, in seconds.
_STOP_S = 1.0

_C = ctypes.CDLL(None, use_errno=True)
_C.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_threads = Threads(1, 'ding-store-pages')


class Toucher:
    """Touches the pages of one table in a background thread."""

    def __init__(self) -> None:
        self._future: Optional[Future[None]] = None
        self._process = os.getpid()
        self._is_stopped = False
        #: False if the kernel does not support it.
        self.is_able = True

    def touch(self, columns: Iterable[Array], start: int, stop: int) -> None:
        """Start to touch these slots, unless the thread is still touching others."""
        self._forget_parents()
        if start >= stop or not self.is_able or (self._future is not None and not self._future.done()):
            return
        self._is_stopped = False
        # If no thread can be started, the writer itself touches the pages.
        with suppress(RuntimeError):
            self._future = _threads.submit(self._touch, list(columns), start, stop)

    def stop(self) -> None:
        """Stop touching pages, before their space is freed or counted. Waits at most a second."""
        self._is_stopped = True
        self._forget_parents()
        if self._future is not None:
            wait([self._future], _STOP_S)

    def _forget_parents(self) -> None:
        """Drop the thread's future in a forked process, which has none of its parent's threads."""
        if self._process != os.getpid():
            self._process, self._future = os.getpid(), None

    def _touch(self, columns: Iterable[Array], start: int, stop: int) -> None:
        for column in columns:
            rows = column[start:stop]
            begin = rows.ctypes.data
            # Only pages that belong to these slots alone: the pages at the edges are being written.
            place = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (begin + rows.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            while place < end and not self._is_stopped:
                size = min(_STEP_BYTES, end - place)
                if _C.madvise(place, size, _MADV_POPULATE_WRITE):
                    self.is_able = False
                    return
                place += size
