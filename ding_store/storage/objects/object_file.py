"""The file of an object: its bytes, then perhaps unused ones, and a trailer with the object's length.

A file that was used by another object before may be longer than its object needs. Its pages are there already: fresh
ones take three times as long as the copy. If the file is large, its pages are made huge ones first. Then a mapping
takes microseconds, where it took a microsecond per 4 KiB.
"""

from __future__ import annotations

import errno
import os
import struct
from contextlib import suppress
from typing import Callable, List, Sequence

import numpy as np

from ding_store import private_files
from ding_store.errors import CorruptPayload, NotEnoughSpace
from ding_store.storage.base import Buffer
from ding_store.storage.shared_memory.mapped_files import (
    HUGE_PAGE,
    PAGE,
    OwnerLock,
    aligned,
    allocate,
    make_huge,
    map_bytes,
    reopened,
)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
#: The object's length, and what is known about the file's pages.
_TRAILER = struct.Struct('<QQ')
_FRESH, _SMALL, _HUGE = range(3)
#: Smaller objects are read: a mapping would take longer.
_MAP_FROM_BYTES = 128 << 10
#: Number of buffers of one write. The kernel's limit is 1024.
_MAX_BUFFERS = 512
#: Bytes of one step of a copy, after which waiting processes see its progress.
_STEP_BYTES = 8 << 20


def footprint(num_bytes: int) -> int:
    """Return the bytes that a new file takes for an object of this length."""
    return pages(num_bytes + _TRAILER.size)


def pages(num_bytes: int) -> int:
    """Return the bytes that a file of this size takes."""
    return max(PAGE, aligned(num_bytes, PAGE))


def in_huge_pages(num_bytes: int) -> int:
    """Return the bytes that an object takes in a file of huge pages. 0: they would be much more than it needs."""
    size = aligned(num_bytes + _TRAILER.size, HUGE_PAGE)
    return size if 2 * size <= 3 * num_bytes else 0


class ObjectFile:
    """
    Overview:
        A file that becomes an object. It is locked, so that other processes see that its maker lives.
    Arguments:
        - held (:obj:`OwnerLock`): The locked file.
        - capacity (:obj:`int`): Its bytes, of which the object will use a part. 0: it is new, and will have the bytes
          that the object needs.
    """

    def __init__(self, held: OwnerLock, capacity: int = 0) -> None:
        self.descriptor = held.descriptor
        self._held = held
        self._capacity = capacity
        self._pages = _FRESH

    def prepare(self) -> None:
        """Enlarge a file that was used before to its capacity, once. Large files get huge pages if there are some."""
        if not self._capacity:
            return
        size = os.fstat(self.descriptor).st_size
        known = _TRAILER.unpack(os.pread(self.descriptor, _TRAILER.size, size - _TRAILER.size))[1]
        if known != _FRESH and size == self._capacity:
            self._pages = known
            return
        self._pages = _SMALL
        try:
            allocate(self.descriptor, 0, self._capacity, 'the file of an object')
        except NotEnoughSpace:
            self._capacity = pages(size)  # The object fits into these pages, and they are there.
            os.ftruncate(self.descriptor, self._capacity)
            return
        if self._capacity >= HUGE_PAGE and make_huge(self.descriptor, self._capacity):
            self._pages = _HUGE

    def write(self, buffers: Sequence[Buffer], num_bytes: int) -> None:
        """Write an object of ``num_bytes``, and its trailer."""
        if self._pages == _HUGE:
            _fill(self.memory(num_bytes), buffers)
            self.finish(num_bytes)
        elif self._capacity:
            _write(self.descriptor, buffers, num_bytes)
            self.finish(num_bytes)
        else:
            _write(self.descriptor, [*buffers, _TRAILER.pack(num_bytes, _FRESH)], num_bytes + _TRAILER.size)

    def memory(self, num_bytes: int) -> memoryview:
        """
        Overview:
            Return memory for the bytes of an object, for as long as a view of it exists. Call ``finish`` then.
        Raises:
            - NotEnoughSpace: The file system is full.
        """
        if self._pages != _HUGE:
            allocate(self.descriptor, 0, num_bytes + _TRAILER.size, 'the file of an object')
        # A mapping keeps the open file. With ``descriptor`` itself, a forked child would keep the lock.
        unlocked = reopened(self.descriptor, os.O_RDWR)
        try:
            return map_bytes(unlocked.descriptor, num_bytes, is_writable=True)
        finally:
            unlocked.close()

    def finish(self, num_bytes: int) -> None:
        """Write the trailer of an object of ``num_bytes``."""
        end = self._capacity or num_bytes + _TRAILER.size
        os.pwrite(self.descriptor, _TRAILER.pack(num_bytes, self._pages), end - _TRAILER.size)

    def copy(self, source: int, moved: Callable[[], None]) -> None:
        """Copy another file's object, without what it does not use. ``moved`` is called after each step."""
        done, num_bytes = 0, length_of(source)
        while done < num_bytes:
            copied = os.sendfile(self.descriptor, source, done, min(_STEP_BYTES, num_bytes - done))
            if not copied:
                raise OSError(errno.EIO, 'the file of an object became shorter')
            done += copied
            moved()
        self.finish(num_bytes)

    def close(self) -> None:
        self._held.close()


def create(path: str) -> OwnerLock:
    """
    Overview:
        Create an empty file.
    Raises:
        - NotEnoughSpace: The file system is full.
    """
    try:
        with suppress(FileExistsError):  # from a process that was killed while it made the same object
            return OwnerLock(private_files.opener(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        return OwnerLock(private_files.create(path))
    except OSError as e:
        if e.errno not in FULL:
            raise
        raise NotEnoughSpace(
            errno.ENOSPC,
            f'no room for another file in {os.path.dirname(path)!r}: {e.strerror}. Make room there, or delete objects.',
        ) from e


def is_mapped(size: int) -> bool:
    """Return whether ``read`` maps a file of this size."""
    return size >= _MAP_FROM_BYTES


def read(descriptor: int, size: int) -> memoryview:
    """
    Overview:
        Return the bytes of an object, read-only, from its file.
    Raises:
        - CorruptPayload: It is no object's file.
    """
    if size < _TRAILER.size:
        raise CorruptPayload(f'the file of an object has {size} bytes')
    view = map_bytes(descriptor, size) if is_mapped(size) else memoryview(os.pread(descriptor, size, 0))
    return view[: _checked(_TRAILER.unpack_from(view, size - _TRAILER.size)[0], size)]


def length_of(descriptor: int) -> int:
    """Return the length of the object in a file."""
    size = os.fstat(descriptor).st_size
    trailer = os.pread(descriptor, _TRAILER.size, max(0, size - _TRAILER.size))
    return _checked(_TRAILER.unpack(trailer)[0] if len(trailer) == _TRAILER.size else size, size)


def _checked(length: int, size: int) -> int:
    if length > size - _TRAILER.size:
        raise CorruptPayload(f'the file of an object has {size} bytes, and its trailer states {length}')
    return length


def _fill(memory: memoryview, buffers: Sequence[Buffer]) -> None:
    target, at = np.frombuffer(memory, np.uint8), 0
    for buffer in buffers:
        if len(buffer):
            source = np.frombuffer(buffer, np.uint8)
            np.copyto(target[at : at + len(source)], source)  # without the interpreter lock
            at += len(source)
    assert at == len(memory), (at, len(memory))


def _write(descriptor: int, buffers: Sequence[Buffer], num_bytes: int) -> None:
    """Write whole buffers. Writing into a file is faster than into its mapping: the kernel need not clear pages."""
    views: List[memoryview] = [memoryview(buffer).cast('B') for buffer in buffers if len(buffer)]
    done = 0
    while views:
        written = os.pwritev(descriptor, views[:_MAX_BUFFERS], done)
        done += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
    assert done == num_bytes, (done, num_bytes)
