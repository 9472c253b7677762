"""A file of records that is only appended to, whose last record may be torn; and rewritten when most of it is dead."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from typing import Iterable, Iterator, List, Optional

from ding_store import private, space
from ding_store.buffer.interrupts import finish
from ding_store.errors import ForeignFile, NotEnoughSpace
from ding_store.syncing import sync_directory

#: Length and checksum of a record.
_HEAD = struct.Struct('<II')
#: Room is taken in steps of this much: a full disk is found out before anything is changed.
_STEP_BYTES = 1 << 20


class Journal:
    """
    Overview:
        Records of bytes. Behind the last one are zeros, or what a crash left of one more.
    Arguments:
        - path (:obj:`str`): The file; made if there is none.
        - fsync (:obj:`bool`): Whether ``rewrite``, ``clear`` and ``sync`` wait for the disk.
    Raises:
        - NotEnoughSpace: The file has holes, and the disk is full.
    """

    def __init__(self, path: str, fsync: bool = False) -> None:
        self._path, self._fsync = path, fsync
        self._descriptor = _open(path)
        self._room = reserve_all(self._descriptor, path)
        self._end = 0
        self._end_compact = 0

    def read(self) -> Iterator[bytes]:
        """All whole records; ``append`` goes on behind them."""
        self._end = 0
        while True:
            head = os.pread(self._descriptor, _HEAD.size, self._end)
            if len(head) < _HEAD.size:
                return
            length, checksum = _HEAD.unpack(head)
            record = os.pread(self._descriptor, length, self._end + _HEAD.size)
            if length == 0 or len(record) < length or zlib.crc32(record) != checksum:
                return
            self._end += _HEAD.size + length
            yield record

    @property
    def end(self) -> int:
        """Where the records end; while they are read, where the last one did."""
        return self._end

    @property
    def wants_compaction(self) -> bool:
        """Whether more than half of it may be dead, and it is worth the while."""
        return self._end > 2 * self._end_compact + _STEP_BYTES

    def reserve(self, records: Iterable[bytes]) -> None:
        """
        Overview:
            Make room for records.
        Raises:
            - NotEnoughSpace: The disk is full; nothing was written.
        """
        end = self._end + sum(_HEAD.size + len(record) for record in records)
        if end > self._room:
            room = max(end, self._room + _STEP_BYTES)
            reserve(self._descriptor, self._path, self._room, room - self._room)
            self._room = room

    def append(self, records: Iterable[bytes]) -> None:
        """Add records; whole ones, whenever the process is killed."""
        block = b''.join(_HEAD.pack(len(record), zlib.crc32(record)) + record for record in records)
        start = self._end

        def append() -> None:
            write_at(self._descriptor, block, start)
            self._end = start + len(block)

        finish(append)

    def rewrite(self, records: Iterable[bytes]) -> None:
        """Have these records instead, at once."""
        self.take(self.prepare(records))

    def try_rewrite(self, records: Iterable[bytes], more: Iterable[bytes] = ()) -> bool:
        """
        Overview:
            As ``rewrite``, with room for more records.
        Returns:
            - is_done (:obj:`bool`): False when the disk is full: nothing changed, and it is not wanted again until much
              has been added.
        """
        try:
            other = self.prepare(records, more=more)
        except NotEnoughSpace:
            self._end_compact = self._end
            return False
        self.take(other)
        return True

    def cut(self, starts: List[int]) -> None:
        """Drop the last records, which begin here, in their own place: a full disk has no other."""
        for start in reversed(starts):
            # All of it, else records of their length, added later, would lead to what is left of them; and the last one
            # first, so that whoever is killed meanwhile finds the others again.
            write_at(self._descriptor, bytes(self._end - start), start)
            self._end = start
        self.sync()

    def prepare(self, records: Iterable[bytes], path: Optional[str] = None, more: Iterable[bytes] = ()) -> Journal:
        """
        Overview:
            A journal of these records beside this one, for ``take``, or at a path of its own, for ``move_to``; with
            room for more records.
        Raises:
            - NotEnoughSpace: The disk is full; nothing changed.
        """
        temporary = path or self._path + '.new'
        if os.path.exists(temporary):
            os.unlink(temporary)
        other = Journal(temporary, self._fsync)
        try:
            for record in records:
                other.reserve([record])
                other.append([record])
            other.reserve(more)
            other.sync()
        except BaseException:
            other.discard()
            raise
        return other

    def take(self, other: Journal) -> None:
        """Have the records of one that was prepared instead, at once."""
        path = other._path

        def take() -> None:
            if os.path.exists(path):
                os.replace(path, self._path)
            if self._fsync:
                sync_directory(os.path.dirname(self._path))
            other._path = self._path
            self.move_to(other)

        finish(take)

    def move_to(self, other: Journal) -> None:
        """Be the journal that was prepared elsewhere."""
        former, self._path, self._room = self._descriptor, other._path, other._room
        self._end = self._end_compact = other._end
        self._descriptor = other._descriptor
        if former != self._descriptor:  # Else it is called again.
            os.close(former)

    def discard(self) -> None:
        """Be no more, and no file."""
        self.close()
        os.unlink(self._path)

    def clear(self) -> None:
        """Have no records. What held them is zero then, so that none of them is read after shorter ones."""
        os.ftruncate(self._descriptor, 0)
        # Else a power cut might bring them back, when what they say of rows no longer holds.
        self.sync()
        self._end = self._end_compact = self._room = 0

    def sync(self) -> None:
        if self._fsync:
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def reserve(descriptor: int, path: str, start: int, num_bytes: int) -> None:
    """
    Raises:
        - NotEnoughSpace: The disk is full.
    """
    try:
        os.posix_fallocate(descriptor, start, num_bytes)
    except OSError as e:
        raise explained(e, path, num_bytes) from e


def reserve_all(descriptor: int, path: str) -> int:
    """
    Overview:
        Have the space of all bytes of a file, which may be a copy with holes; returns how many there are.
    Raises:
        - NotEnoughSpace: The disk is full; the file is closed.
    """
    num_bytes = os.fstat(descriptor).st_size
    try:
        if num_bytes:
            reserve(descriptor, path, 0, num_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return num_bytes


def explained(error: OSError, path: str, num_bytes: int) -> OSError:
    """NotEnoughSpace for a full disk, else the error as it is."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return error
    directory = os.path.dirname(os.path.abspath(path))
    made: NotEnoughSpace = space.not_enough_space(os.path.basename(path), num_bytes, directory)
    return made


def write_at(descriptor: int, data: bytes, start: int) -> None:
    """All of it: one write may take less."""
    view = memoryview(data)
    while len(view):
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written


def _open(path: str) -> int:
    try:
        return private.opener(path, os.O_RDWR | os.O_CREAT)
    except ForeignFile:
        raise
    except OSError as e:
        raise explained(e, path, 0) from e
