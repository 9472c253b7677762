"""An append-only file of records. The last record may be torn. The file is rewritten when most records are outdated."""

from __future__ import annotations

import errno
import mmap
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
#: The beginning of the file: magic, end of the records, and a checksum of both. One write stores it, and no kill tears
#: it.
_MAGIC, _START = b'DSJRNL\0\1', struct.Struct('<8sQQ')
_BEGIN = struct.Struct('<8sQ')
#: The minimum size of a journal that was not cleared.
MIN_BYTES = _START.size
#: Step in which space is reserved. A full disk is thus detected before anything is changed.
_STEP_BYTES = 1 << 20
#: Number of bytes read at once.
_BLOCK_BYTES = 1 << 18


class Journal:
    """
    Overview:
        A file of byte records. The beginning of the file stores an end. All records up to this end must be whole,
        otherwise the file was damaged. Behind it are zeros, or remains of later records after a crash.
    Arguments:
        - path (:obj:`str`): The file. It is created if there is none.
        - fsync (:obj:`bool`): Whether ``rewrite``, ``clear`` and ``sync`` wait for the disk. The stored end is then the
          end of the records on the disk. A power cut may lose records that were added since.
    Raises:
        - NotEnoughSpace: The file has holes, and the disk is full.
    """

    def __init__(self, path: str, fsync: bool = False) -> None:
        self._path, self._fsync = path, fsync
        self._descriptor = _open(path)
        self._room = reserve_all(self._descriptor, path)
        self._end = self._end_compact = _START.size
        #: Whether nothing was added or erased since the last sync.
        self._is_synced = False
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
            Yield all whole records. ``append`` continues after them.
        Raises:
            - CorruptPayload: The file was damaged.
        """
        self._end = _START.size
        for record, end in self._records():
            self._end = end
            yield record

    def findings(self) -> List[str]:
        """Return all problems of the file."""
        try:
            end = max((end for _, end in self._records()), default=_START.size)
        except CorruptPayload as e:
            return [str(e)]
        return [] if end == self._end else [f'{self._path!r} has records up to {end}, not up to {self._end}']

    def _records(self) -> Iterator[Tuple[bytes, int]]:
        """Yield each record and the position of its end."""
        end, promised = _START.size, self._promised()
        place, block = end, b''
        while True:
            # One block holds many records in most cases.
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
                        f'byte {promised}. Restore the directory from a copy.'
                    )
                return
            end += _HEAD.size + length
            yield record, end

    def _promised(self) -> int:
        """Return the position up to which records must be whole."""
        start = os.pread(self._descriptor, _START.size, 0)
        if not any(start):
            return _START.size  # A power cut came before anything was on the disk.
        magic, end, checksum = _START.unpack(start.ljust(_START.size, b'\0'))
        if magic != _MAGIC or checksum != zlib.crc32(start[:16]):
            raise CorruptPayload(f'{self._path!r} was damaged at its beginning. Restore the directory from a copy.')
        return int(end)

    def _promise(self) -> None:
        """Store the present end: all records up to it must be whole from now on."""
        start = _BEGIN.pack(_MAGIC, self._end)
        write_at(self._descriptor, start + zlib.crc32(start).to_bytes(8, 'little'), 0)

    @property
    def end(self) -> int:
        """The end of the records. During ``read``, the end of the last record read."""
        return self._end

    @property
    def wants_compaction(self) -> bool:
        """True if more than half of the file may be outdated and a rewrite pays."""
        return self._end > 2 * self._end_compact + _STEP_BYTES

    def reserve(self, records: Iterable[bytes]) -> None:
        """
        Overview:
            Reserve space for records.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing was written.
        """
        end = self._end + sum(_HEAD.size + len(record) for record in records)
        if end > self._room:
            room = max(end, self._room + _STEP_BYTES)
            reserve(self._descriptor, self._path, self._room, room - self._room)
            self._room = room

    def append(self, records: Iterable[bytes]) -> None:
        """Append records. A kill leaves only whole ones."""
        block, start = _block(records), self._end

        def append() -> None:
            self._write(block, start)
            if not self._fsync:
                self._promise()

        finish(append)

    def _write(self, block: bytes, start: int) -> None:
        self._is_synced = False
        write_at(self._descriptor, block, start)
        self._end = start + len(block)

    def rewrite(self, records: Iterable[bytes]) -> None:
        """Replace all records at once."""
        self.take(self.prepare(records))

    def try_rewrite(self, records: Iterable[bytes], more: Iterable[bytes] = ()) -> bool:
        """
        Overview:
            Replace all records, like ``rewrite``, and reserve space for more records.
        Returns:
            - is_done (:obj:`bool`): False if the disk is full. Nothing changed then, and ``wants_compaction`` is false
              until much was added.
        """
        try:
            other = self.prepare(records, more=more)
        except NotEnoughSpace:
            self._end_compact = self._end
            return False
        self.take(other)
        return True

    def cut(self, starts: List[int]) -> None:
        """Remove the last records, which begin at ``starts``, in place. A rewrite would need space on a full disk."""
        self.sync()
        for start in reversed(starts):
            # Erase each record completely: a new record of the same length would otherwise lead to the remains of the
            # next one. Erase the last record first, so that a killed process finds the others again.
            end, self._end = self._end, start
            self._promise()
            if self._fsync:
                # Without the sync, a power cut might keep an end that covers erased records.
                os.fsync(self._descriptor)
            self._is_synced = False
            write_at(self._descriptor, bytes(end - start), start)
        self.sync()

    def prepare(self, records: Iterable[bytes], path: Optional[str] = None, more: Iterable[bytes] = ()) -> Journal:
        """
        Overview:
            Write another journal with these records, and reserve space for more. It is for ``take``. With ``path`` it
            is for ``move_to``.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed.
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
        """Replace the file by that of a prepared journal, at once."""
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
        """Switch to the file of a journal that was prepared under another path."""
        former, self._path, self._room = self._descriptor, other._path, other._room
        self._end = self._end_compact = other._end
        self._descriptor, self._is_synced = other._descriptor, False
        if former != self._descriptor:  # The descriptors are equal if this is called again.
            os.close(former)

    def discard(self) -> None:
        """Close the journal and delete its file."""
        self.close()
        os.unlink(self._path)

    def clear(self) -> None:
        """Remove all records. Their bytes become zeros, so that none of them is read after a shorter one."""
        os.ftruncate(self._descriptor, 0)
        self._end, self._end_compact, self._room = _START.size, _START.size, 0
        # Otherwise a power cut might restore records that are no longer valid for the rows.
        if self._fsync:
            os.fsync(self._descriptor)

    def sync(self) -> None:
        if self._fsync and not self._is_synced:
            os.fsync(self._descriptor)
            self._promise()
            self._is_synced = True

    def close(self) -> None:
        os.close(self._descriptor)


def _block(records: Iterable[bytes]) -> bytes:
    return b''.join(_HEAD.pack(len(record), zlib.crc32(record)) + record for record in records)


def map_file(path: str, num_bytes: int) -> mmap.mmap:
    """
    Map a file with at least ``num_bytes``, and reserve its space. On a full disk a write to a hole would raise SIGBUS.
    """
    descriptor = private_files.opener(path, os.O_RDWR | os.O_CREAT)
    try:
        reserve(descriptor, path, 0, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def reserve(descriptor: int, path: str, start: int, num_bytes: int) -> None:
    """
    Overview:
        Reserve the space of ``num_bytes`` bytes of a file from ``start`` on.
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
        Reserve the space of all bytes of a file, which may be a copy with holes. Return its size.
    Raises:
        - NotEnoughSpace: The disk is full. The file is closed.
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
    """Return NotEnoughSpace for a full disk, otherwise the error itself."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return error
    directory = os.path.dirname(os.path.abspath(path))
    made: NotEnoughSpace = free_space.not_enough_space(os.path.basename(path), num_bytes, directory)
    return made


def write_at(descriptor: int, data: bytes, start: int) -> None:
    """Write all bytes of ``data``. A single write may write fewer."""
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
