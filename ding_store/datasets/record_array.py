"""
Arrays of records: lists of millions of byte strings or small arrays, written once and mapped by every process.

    magic (8 bytes)
    the records, one after the other
    their ends (uint64), at a multiple of 8
    a line of JSON: what a record is, the number of records, the position of the ends, checksums
    the length of the line (8 bytes, little endian), its crc32 (4 bytes), magic
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from types import TracebackType
from typing import Any, Iterable, Iterator, List, Optional, Sequence, Type, Union

import numpy as np

from ding_store import private_files
from ding_store.buffer.array_types import Array
from ding_store.datasets.order import EpochOrder
from ding_store.errors import CorruptPayload, FormatMismatch, RowGone, SchemaMismatch
from ding_store.power_cuts import sync_directory

FORMAT = 1
_MAGIC = b'dsrecord'
_TAIL = 8 + 4 + len(_MAGIC)
#: Bytes and records that are written at a time.
_WRITE_BYTES, _NUM_ENDS = 4 << 20, 1 << 16

#: A record: a byte string, or an array whose first axis may have any length.
Record = Union[bytes, Array]


class RecordArray:
    """
    Overview:
        A read-only list of records in one file. All processes of a host share one copy of it in the page cache, and
        opening it reads only its end. ``array[i]`` is a byte string, or a view of the file for arrays.
    Arguments:
        - path (:obj:`str`): The file that ``write`` made.
    Raises:
        - CorruptPayload: The file is damaged or is no array of records.
        - FormatMismatch: Another version of ding_store wrote it.
    """

    def __init__(self, path: Union[str, os.PathLike]) -> None:
        self.path = os.fspath(path)
        with open(self.path, 'rb', opener=private_files.opener) as file:
            about = _about(file, self.path)
            size = os.fstat(file.fileno()).st_size
            self._map = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
        self._about = about
        try:
            self._num = int(about['num_records'])
            self._ends = np.frombuffer(self._map, np.uint64, self._num, about['ends_at'])
            self._dtype = None if about['dtype'] is None else np.dtype(about['dtype'])
            self._shape = tuple(about['shape'])
            self._item = 1 if self._dtype is None else self._dtype.itemsize * int(np.prod(self._shape))
            self._data = np.frombuffer(self._map, np.uint8, about['ends_at'])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptPayload(f'{self.path!r} is damaged: {error!r}') from error

    @staticmethod
    def write(path: Union[str, os.PathLike], records: Iterable[Record]) -> int:
        """
        Overview:
            Write records to a file, which appears whole and survives a power cut. Memory is needed for the ends alone,
            8 bytes per record.
        Arguments:
            - records (:obj:`Iterable`): Byte strings, or arrays of one dtype. All axes but the first have one size.
        Returns:
            - num_records (:obj:`int`): Records written.
        Raises:
            - SchemaMismatch: A record is of another kind than the first one.
        """
        path = os.fspath(path)
        temporary = f'{path}.new'
        try:
            with open(temporary, 'wb', opener=private_files.create_opener) as file:
                num_records = _write(file, records)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except BaseException:
            if os.path.exists(temporary):
                os.unlink(temporary)
            raise
        sync_directory(os.path.dirname(os.path.abspath(path)))
        return num_records

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> Record:
        """
        Raises:
            - RowGone: There is no such record.
        """
        if not -self._num <= index < self._num:
            raise RowGone(f'record {index} is not one of the {self._num} records of {self.path!r}')
        index %= self._num
        begin = int(self._ends[index - 1]) if index else len(_MAGIC)
        return self._record(begin, int(self._ends[index]))

    def __iter__(self) -> Iterator[Record]:
        return (self[index] for index in range(self._num))

    def take(self, indices: Union[Sequence[int], Array]) -> List[Record]:
        """Return several records, in this order. Raises RowGone if one does not exist."""
        wanted = np.asarray(indices, np.int64).reshape(-1)
        wanted = np.where(wanted < 0, wanted + self._num, wanted)
        wrong = np.flatnonzero((wanted < 0) | (wanted >= self._num))
        if len(wrong):
            raise RowGone(f'record {np.asarray(indices).reshape(-1)[wrong[0]]} is not one of the {self._num} records')
        begins = np.where(wanted > 0, self._ends[wanted - 1], len(_MAGIC)) if self._num else wanted
        return [self._record(*place) for place in zip(begins.tolist(), self._ends[wanted].tolist())]

    def epochs(
        self,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        num_epochs: Optional[int] = None,
    ) -> Iterator[List[Record]]:
        """Yield lists of records: each record once per epoch, in a random order, see ``DataSet.epochs``."""
        order = EpochOrder(self._num, batch_size, seed, rank, world_size)
        epoch = 0
        while num_epochs is None or epoch < num_epochs:
            for number in range(order.num_batches):
                yield self.take(order.batch(epoch, number))
            epoch += 1

    def verify(self) -> None:
        """
        Overview:
            Read the whole file once, and compare its checksums.
        Raises:
            - CorruptPayload: A checksum is wrong.
        """
        ends_at = self._about['ends_at']
        for name, part in (('records', self._data), ('ends', self._ends.view(np.uint8))):
            crc = 0
            for first in range(0, len(part), _WRITE_BYTES):
                crc = zlib.crc32(part[first : first + _WRITE_BYTES].data, crc)
            if crc != self._about['checksums'][name]:
                raise CorruptPayload(f'{self.path!r} is damaged: the checksum of its {name} is wrong')
        if self._num and (int(self._ends[-1]) > ends_at or (np.diff(self._ends.astype(np.int64)) < 0).any()):
            raise CorruptPayload(f'{self.path!r} is damaged: the ends of its records do not grow')

    def close(self) -> None:
        """Drop the mapping. Arrays that were returned stay valid."""
        self._data = self._ends = np.empty(0, np.uint8)
        self._num = 0

    def __enter__(self) -> RecordArray:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def _record(self, begin: int, end: int) -> Record:
        if self._dtype is None:
            return self._map[begin:end]
        made: Array = self._data[begin:end].view(self._dtype).reshape(-1, *self._shape)
        return made


class _Kind:
    """The dtype and shape of the records of one array, as the first one has them."""

    def __init__(self, first: Any) -> None:
        self.dtype: Optional[np.dtype[Any]] = None
        self.shape: Any = ()
        if isinstance(first, np.ndarray):
            if first.dtype.hasobject or first.dtype.names is not None or first.ndim < 1:
                raise SchemaMismatch(f'records are byte strings, or arrays of numbers with an axis, not {first.dtype}')
            self.dtype, self.shape = first.dtype, first.shape[1:]
        elif not isinstance(first, (bytes, bytearray, memoryview)):
            raise SchemaMismatch(f'records are byte strings or arrays, not {type(first).__name__}')

    def encoded(self, number: int, record: Any) -> bytes:
        if self.dtype is None:
            if not isinstance(record, (bytes, bytearray, memoryview)):
                raise SchemaMismatch(f'record {number} is a {type(record).__name__}, and the first one a byte string')
            return bytes(record)
        if not isinstance(record, np.ndarray) or (record.dtype, record.shape[1:]) != (self.dtype, self.shape):
            found = f'{record.dtype} {record.shape}' if isinstance(record, np.ndarray) else type(record).__name__
            raise SchemaMismatch(f'record {number} is {found}, and the first one {self.dtype} (*, *{self.shape})')
        return record.tobytes()


def _write(file: Any, records: Iterable[Record]) -> int:
    file.write(_MAGIC)
    position, crc, crc_of_ends, num_records = len(_MAGIC), zlib.crc32(_MAGIC), 0, 0
    pieces: List[bytes] = []
    pending = 0
    kind: Optional[_Kind] = None
    parts: List[Array] = []
    ends: List[int] = []
    for record in records:
        kind = kind or _Kind(record)
        piece = kind.encoded(num_records, record)
        pieces.append(piece)
        pending += len(piece)
        position += len(piece)
        ends.append(position)
        num_records += 1
        if pending >= _WRITE_BYTES:
            data = b''.join(pieces)
            crc = zlib.crc32(data, crc)
            file.write(data)
            pieces, pending = [], 0
        if len(ends) == _NUM_ENDS:
            parts.append(np.array(ends, np.uint64))
            ends = []
    data = b''.join(pieces) + bytes(-position % 8)
    file.write(data)
    position += -position % 8
    crc = zlib.crc32(data, crc)
    for part in (*parts, np.array(ends, np.uint64)):
        crc_of_ends = zlib.crc32(part.tobytes(), crc_of_ends)
        file.write(part.tobytes())
    about = {
        'format': FORMAT,
        'num_records': num_records,
        'dtype': None if kind is None or kind.dtype is None else kind.dtype.str,
        'shape': [] if kind is None else list(kind.shape),
        'ends_at': position,
        'checksums': {'records': crc, 'ends': crc_of_ends},
    }
    text = json.dumps(about).encode()
    file.write(text + len(text).to_bytes(8, 'little') + zlib.crc32(text).to_bytes(4, 'little') + _MAGIC)
    return num_records


def _about(file: Any, path: str) -> Any:
    """Return the description at the end of a file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL))
    tail = file.read(_TAIL)
    length = int.from_bytes(tail[:8], 'little')
    if len(tail) < _TAIL or tail[12:] != _MAGIC or length > size - _TAIL - len(_MAGIC):
        raise CorruptPayload(f'{path!r} is no array of records, or is cut short')
    file.seek(size - _TAIL - length)
    text = file.read(length)
    if zlib.crc32(text).to_bytes(4, 'little') != tail[8:12]:
        raise CorruptPayload(f'{path!r} is damaged: the checksum of its description is wrong')
    about = json.loads(text)
    if about['format'] != FORMAT:
        raise FormatMismatch(
            f'{path!r} has format {about["format"]}, but this ding_store reads format {FORMAT}. Read it with the '
            'version of ding_store that wrote it.'
        )
    return about
