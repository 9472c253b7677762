"""A file of records that is only appended to, whose last record may be torn; and rewritten when most of it is dead."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from contextlib import suppress
from typing import Iterable, Iterator, List, Optional, Tuple

from ding_store import free_space, private_files
from ding_store.buffer.interrupts import finish
from ding_store.errors import CorruptPayload, ForeignFile, NotEnoughSpace
from ding_store.power_cuts import sync_directory

#: Length and checksum of a record.
_HEAD = struct.Struct('<II')
#: At the beginning of the file: magic, the end of the records, a checksum of that. One write, which no kill tears.
_MAGIC, _START = b'DSJRNL\0\1', struct.Struct('<8sQQ')
_BEGIN = struct.Struct('<8sQ')
#: No journal is shorter, but one that was cleared.
MIN_BYTES = _START.size
#: Room is taken in steps of this much: a full disk is found out before anything is changed.
_STEP_BYTES = 1 << 20
#: So much is read at once.
_BLOCK_BYTES = 1 << 18


class Journal:
    """
    Overview:
        Records of bytes. Up to the end that stands at the beginning of the file all of them must be whole: else the
        file was damaged. Behind it are zeros, or what a crash left of more records.
    Arguments:
        - path (:obj:`str`): The file; made if there is none.
        - fsync (:obj:`bool`): Whether ``rewrite``, ``clear`` and ``sync`` wait for the disk. The end is then where
          the records on the disk end: what was added since may be lost by a power cut.
    Raises:
        - NotEnoughSpace: The file has holes, and the disk is full.
    """

    def __init__(self, path: str, fsync: bool = False) -> None:
        self._path, self._fsync = path, fsync
        self._descriptor = _open(path)
        self._room = reserve_all(self._descriptor, path)
        self._end = self._end_compact = _START.size
        if self._room == 0:
            try:
                self._promise()
            except OSError as e:
                self.discard()
                raise explained(e, path, _START.size) from e
            self._room = _START.size

    def read(self) -> Iterator[bytes]:
        """
        Overview:
            All whole records; ``append`` goes on behind them.
        Raises:
            - CorruptPayload: The file was damaged.
        """
        self._end = _START.size
        for record, end in self._records():
            self._end = end
            yield record

    def findings(self) -> List[str]:
        """What is wrong with the file."""
        try:
            end = max((end for _, end in self._records()), default=_START.size)
        except CorruptPayload as e:
            return [str(e)]
        return [] if end == self._end else [f'{self._path!r} has records up to {end}, not up to {self._end}']

    def _records(self) -> Iterator[Tuple[bytes, int]]:
        """Each, and where it ends."""
        end, promised = _START.size, self._promised()
        place, block = end, b''
        while True:
            # What is read at once: mostly many records.
            if end + _HEAD.size > place + len(block):
                place, block = end, os.pread(self._descriptor, _BLOCK_BYTES, end)
            head = block[end - place : end - place + _HEAD.size]
            length, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
            start = end + _HEAD.size
            if start + length > place + len(block) and start + length <= self._room:
                place, block = end, os.pread(self._descriptor, max(_BLOCK_BYTES, _HEAD.size + length), end)
            record = block[start - place : start - place + length]
            if length == 0 or len(record) < length or zlib.crc32(record) != checksum:
                if end < promised:
                    raise CorruptPayload(
                        f'{self._path!r} was damaged: its record at byte {end} is not whole, and more follow up to '
                        f'byte {promised}; restore the directory from a copy'
                    )
                return
            end += _HEAD.size + length
            yield record, end

    def _promised(self) -> int:
        """Up to where records must be whole."""
        start = os.pread(self._descriptor, _START.size, 0)
        if not any(start):
            return _START.size  # A power cut came before anything was on the disk.
        magic, end, checksum = _START.unpack(start.ljust(_START.size, b'\0'))
        if magic != _MAGIC or checksum != zlib.crc32(start[:16]):
            raise CorruptPayload(f'{self._path!r} was damaged at its beginning; restore the directory from a copy')
        return int(end)

    def _promise(self) -> None:
        """All records up to here are whole."""
        start = _BEGIN.pack(_MAGIC, self._end)
        write_at(self._descriptor, start + zlib.crc32(start).to_bytes(8, 'little'), 0)

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
        block, start = _block(records), self._end

        def append() -> None:
            self._write(block, start)
            if not self._fsync:
                self._promise()

        finish(append)

    def _write(self, block: bytes, start: int) -> None:
        write_at(self._descriptor, block, start)
        self._end = start + len(block)

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
        self.sync()
        for start in reversed(starts):
            # All of it, else records of their length, added later, would lead to what is left of them; and the last one
            # first, so that whoever is killed meanwhile finds the others again.
            end, self._end = self._end, start
            self._promise()
            if self._fsync:
                # Else a power cut might keep the promise of what is erased.
                os.fsync(self._descriptor)
            write_at(self._descriptor, bytes(end - start), start)
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
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        other = Journal(temporary, self._fsync)
        try:
            for record in records:
                other.reserve([record])
                other._write(_block([record]), other._end)
            other.reserve(more)
            if self._fsync:
                os.fsync(other._descriptor)
            other._promise()
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
        self._end, self._end_compact, self._room = _START.size, _START.size, 0
        # Else a power cut might bring them back, when what they say of rows no longer holds.
        if self._fsync:
            os.fsync(self._descriptor)

    def sync(self) -> None:
        if self._fsync:
            os.fsync(self._descriptor)
            self._promise()

    def close(self) -> None:
        os.close(self._descriptor)


def convert(path: str, fsync: bool) -> None:
    """Write a journal of an earlier version, which had no beginning, as one of this version, if that is not done."""
    descriptor = _open(path)
    try:
        start = os.pread(descriptor, len(_MAGIC), 0)
        if start == _MAGIC:
            return
        with suppress(FileNotFoundError):
            os.unlink(path + '.new')
        made, place = Journal(path + '.new', fsync), 0
        while True:
            head = os.pread(descriptor, _HEAD.size, place)
            length, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
            record = os.pread(descriptor, length, place + _HEAD.size)
            if length == 0 or len(record) < length or zlib.crc32(record) != checksum:
                break
            made.reserve([record])
            made.append([record])
            place += _HEAD.size + length
        made.sync()
        made.close()
        os.replace(path + '.new', path)
        if fsync:
            sync_directory(os.path.dirname(path))
    finally:
        os.close(descriptor)


def _block(records: Iterable[bytes]) -> bytes:
    return b''.join(_HEAD.pack(len(record), zlib.crc32(record)) + record for record in records)


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
    made: NotEnoughSpace = free_space.not_enough_space(os.path.basename(path), num_bytes, directory)
    return made


def write_at(descriptor: int, data: bytes, start: int) -> None:
    """All of it: one write may take less."""
    view = memoryview(data)
    while len(view):
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written


def _open(path: str) -> int:
    try:
        return private_files.opener(path, os.O_RDWR | os.O_CREAT)
    except ForeignFile:
        raise
    except OSError as e:
        raise explained(e, path, 0) from e
