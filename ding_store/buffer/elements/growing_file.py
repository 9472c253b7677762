"""A file that is mapped into memory and grows: in a table's directory, or private to this process."""

from __future__ import annotations

import mmap
import os
import uuid
import weakref
from contextlib import suppress
from typing import Optional, Sequence

import numpy as np

from ding_store import free_space, private_files
from ding_store.buffer.array_types import Array
from ding_store.buffer.persistence.journal import reserve
from ding_store.compiled import join_at
from ding_store.errors import NotEnoughSpace

#: The file grows by this much, or by a quarter.
_STEP_BYTES = 1 << 20


class GrowingFile:
    """
    Overview:
        Bytes that any number of threads read while one thread writes others. The file never becomes shorter: a reader
        of a truncated page would be killed by SIGBUS. Space behind the end is freed instead.
    Arguments:
        - path (:obj:`Optional[str]`): The file, which is created if there is none. None: memory of this process, or a
          file without a name if memory is too small.
    """

    def __init__(self, path: Optional[str]) -> None:
        self.path = path
        #: The bytes of the file. A new array when the file has grown.
        self.view: Array = np.empty(0, np.uint8)
        #: Bytes up to this one may be written.
        self.num_reserved = 0
        #: How many bytes the file will probably have. They decide whether a private file fits into memory.
        self.expected_bytes = 0
        self._is_memory = False
        self._descriptor = -1
        if path is not None:
            self._use(private_files.opener(path, os.O_RDWR | os.O_CREAT))
            self._map()
            self.num_reserved = len(self.view)

    def reserve(self, end: int) -> None:
        """
        Overview:
            Make all bytes before ``end`` writable, and some more.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        start = self.num_reserved
        if end <= start:
            return
        if self._descriptor < 0:
            self._create()
        ahead = max(end, start + max(_STEP_BYTES, start // 4))
        try:
            self._lengthen(start, ahead)
        except NotEnoughSpace:
            ahead = end
            self._lengthen(start, ahead)
        self._map()
        self.num_reserved = ahead

    def reserve_all(self) -> None:
        """Reserve the space of all bytes again. A copy of the file may have holes."""
        if self.num_reserved and self.path is not None:
            reserve(self._descriptor, self.path, 0, self.num_reserved)

    def cut(self, end: int) -> None:
        """Free the space of all bytes from ``end`` on."""
        self.num_reserved = min(self.num_reserved, end)
        start = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < len(self.view) and hasattr(mmap, 'MADV_REMOVE'):
            # Without support for holes in the file system, the space stays in use.
            with suppress(OSError):
                self._region.madvise(mmap.MADV_REMOVE, start)

    def write(self, parts: Sequence[Array], places: Sequence[int]) -> None:
        """Write arrays of bytes to these places of reserved space."""
        join_at(self.view, parts, places)

    def read(self, start: int, num_bytes: int) -> Array:
        """Return a copy of these bytes, or fewer if they are not all there."""
        if not 0 <= start <= start + num_bytes <= self.num_reserved:
            return np.empty(0, np.uint8)
        return self.view[start : start + num_bytes].copy()

    def sync(self) -> None:
        """Write all bytes to the disk."""
        if self._descriptor >= 0:
            os.fdatasync(self._descriptor)

    def _use(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # Do not close it before the last reader has finished.
        weakref.finalize(self, os.close, descriptor)

    def _create(self) -> None:
        """Create a private file."""
        directory = free_space.private_directory(self.expected_bytes)
        if directory is None and hasattr(os, 'memfd_create'):
            self._is_memory = True
            self._use(os.memfd_create('ding-store', os.MFD_CLOEXEC))
            return
        name = os.path.join(directory or free_space.roomiest_directory(), f'ding-store-{uuid.uuid4().hex}.packed')
        try:
            self._use(private_files.opener(name, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        finally:
            # Unlink it even if a signal arrives right after the call that created the file.
            with suppress(FileNotFoundError):
                os.unlink(name)

    def _lengthen(self, start: int, end: int) -> None:
        if self._is_memory:
            # The kernel allocates these pages when they are first written.
            os.ftruncate(self._descriptor, max(end, len(self.view)))
        else:
            # On a full disk a write to a hole would raise SIGBUS.
            reserve(self._descriptor, self.path or free_space.roomiest_directory(), start, end - start)

    def _map(self) -> None:
        num_bytes = os.fstat(self._descriptor).st_size
        if num_bytes > len(self.view):
            self._region = mmap.mmap(self._descriptor, num_bytes)
            self.view = np.frombuffer(self._region, np.uint8)
