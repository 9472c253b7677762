"""Reads a table's directory in place, while another process of this host changes it. Takes no lock, changes nothing."""

from __future__ import annotations

import mmap
import operator
import os
import time
import weakref
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Set

import numpy as np

from ding_store import private_files
from ding_store.buffer.array_types import Array
from ding_store.buffer.batch import Batch
from ding_store.buffer.elements.item_layout import ItemLayout
from ding_store.buffer.elements.packet_file import BYTES, CHECKSUM, NAME, PLACE
from ding_store.buffer.elements.packets import Packet
from ding_store.buffer.elements.ragged_elements import specs_of
from ding_store.buffer.persistence.commits import FILE_BYTES, next_row_in
from ding_store.buffer.persistence.journal import MIN_BYTES
from ding_store.buffer.persistence.table_header import StoredColumn, TableHeader, read_header
from ding_store.buffer.table.encodings import Column, NarrowColumn
from ding_store.buffer.table.row_choices import as_rows
from ding_store.buffer.table.specs import spec_bytes
from ding_store.columns import Schema
from ding_store.columns.ragged import ragged_lengths
from ding_store.errors import ConfigError, CorruptPayload, RowGone, SchemaMismatch, StoreTimeout

#: A read that the owner disturbs is repeated for so long.
PATIENCE_S = 10.0


class TableReader:
    """
    Overview:
        The elements of a ``MemoryBank`` or ``StoreBuffer`` with a path, for any number of other processes of the host.
        The files are mapped, so that all readers share one copy in memory. A read copies the requested rows, and checks
        afterwards that they are still the same rows. If not, it is repeated.

        ``reader[row]`` returns one element. ``len``, ``in`` and iteration over the row numbers work as well. Changes by
        the owner are visible at once.
    Arguments:
        - path (:obj:`str`): The directory of the table.
    Raises:
        - ConfigError: There is no table in ``path``, or it shares frames.
        - FormatMismatch, CorruptPayload: Another version wrote ``path``, or its files are damaged.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._files: Optional[_Files] = None
        #: Rows below this one were there before. Their arrays are compared with their checksums once.
        self._first_own_row = self._current().next_row
        self._whole_rows: Set[int] = set()

    @property
    def schema(self) -> Optional[Schema]:
        """The leaves of an element. None before the first element."""
        return self._current().schema

    def __getitem__(self, row: int) -> Any:
        """Return a copy of an element. Raises the same errors as ``gather``."""
        return self.gather([operator.index(row)])[0]

    def gather(self, rows: Any) -> List[Any]:
        """
        Overview:
            Return copies of elements, in this order.
        Arguments:
            - rows (:obj:`Any`): Row numbers ``(n,)``.
        Raises:
            - RowGone: An element has left, was deleted, or never existed.
            - CorruptPayload: An element was damaged. The message names its row.
            - StoreTimeout: The owner changed these rows all the time, or was killed in the middle of an update.
        """
        schema, columns, _ = self._read(rows, is_padded=False)
        return [] if schema is None else schema.decode(columns)

    def gather_batch(self, rows: Any) -> Batch:
        """Return one collated batch of elements, see ``StoreBuffer.gather_batch``. Raises the errors of ``gather``."""
        schema, columns, numbers = self._read(rows, is_padded=True)
        if schema is None:
            raise SchemaMismatch(f'{self.path!r} has no elements yet, so there is no batch')
        lengths = ragged_lengths(schema, columns)
        return Batch(schema.decode_batch(columns), numbers, lambda: schema.decode(columns), None, lengths)

    def rows(self) -> Array:
        """Return the row numbers of all elements, oldest first, int64."""
        files = self._current()
        numbers = np.array(files.numbers)
        return np.sort(numbers[(numbers >= files.first_row) & (numbers < files.next_row)])

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows().tolist())

    def __len__(self) -> int:
        return len(self.rows())

    def __contains__(self, row: object) -> bool:
        wanted = np.array([operator.index(row)], np.int64)  # type: ignore[arg-type]
        return bool(self._current().find(wanted)[1][0])

    def close(self) -> None:
        """Release the files. The next read opens them again."""
        self._files = None

    def __enter__(self) -> TableReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _current(self) -> _Files:
        """Return the files of the present header."""
        deadline = time.monotonic() + PATIENCE_S
        while self._files is None or not self._files.is_current():
            try:
                self._files = _Files(self.path)
            except FileNotFoundError as e:
                if not os.path.exists(os.path.join(self.path, 'header')):
                    raise no_table(self.path) from None
                # Usually the owner replaced the header meanwhile, and removed what the old one named.
                if time.monotonic() > deadline:
                    raise CorruptPayload(f'{e.filename!r} is missing. Restore the directory from a copy.') from e
        return self._files

    def _read(self, rows: Any, is_padded: bool) -> Any:
        """Return the schema, the columns of these rows, and their numbers."""
        wanted, deadline = (
            as_rows(np.asarray(rows, np.int64) if not len(rows) else rows),
            time.monotonic() + PATIENCE_S,
        )
        while True:
            files = self._current()
            slots, found = files.find(wanted)
            if not found.all():
                if files.is_current():
                    raise RowGone(f'row {wanted[~found][0]} is not in {self.path!r}: it has left, or never existed')
                continue
            was_calm, copied = files.is_calm(), files.copy(slots, is_padded)
            is_same = bool((files.numbers[slots] == wanted).all()) and files.is_same(slots, copied.arrays)
            if was_calm and is_same and files.is_calm() and files.is_current():
                self._check(files, wanted, copied)
                return files.schema, copied.columns, wanted
            if time.monotonic() > deadline:
                raise StoreTimeout(
                    f'rows of {self.path!r} could not be read within {PATIENCE_S:g} s, because they kept changing or '
                    'an update was interrupted. Open the table in its owner, which completes the update.'
                )

    def _check(self, files: _Files, rows: Array, copied: _Copied) -> None:
        for place in np.flatnonzero(~copied.is_sound).tolist():
            raise files.packet(int(rows[place]), place, copied.arrays).damage(self.path)
        if files.layout is None:
            return
        for place in np.flatnonzero(rows < self._first_own_row).tolist():
            row = int(rows[place])
            if row not in self._whole_rows:
                packet = files.packet(row, place, copied.arrays)
                # The packet may have been overwritten since the copy. The row has left then.
                if not packet.is_whole and files.find(rows[place : place + 1])[1][0]:
                    raise packet.damage(self.path)
                self._whole_rows.add(row)


class _Copied(NamedTuple):
    """Columns as copied, the same with ragged leaves, and which rows have sound lengths and places."""

    arrays: Dict[str, Array]
    columns: Mapping[str, Any]
    is_sound: Array


class _Files:
    """The files that one header names, mapped for reading."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._header_path = self._file('header')
        # While the descriptor is open, no other header can have the number of this file.
        self._inode = os.fstat(self._descriptor('header')).st_ino
        header = read_header(self._header_path)
        if header is None:
            raise no_table(path)
        self._header: TableHeader = header
        end = f'.{header.generation}' if header.generation else ''
        self.numbers: Array = np.frombuffer(self._mapped(f'rows{end}', 8 * header.capacity), np.int64)
        self._commits = self._mapped('commit', FILE_BYTES)
        self._redo = self._descriptor('redo')
        self.schema = _schema_of(path, header)
        self.layout: Optional[ItemLayout] = None
        self._packets, self._view = -1, np.empty(0, np.uint8)
        self._columns: Dict[str, Column] = {}
        if self.schema is not None:
            self._columns = {column.name: self._column(column) for column in header.columns}
            if self.schema.ragged:
                self.layout = ItemLayout(self.schema, has_checksums=True)
                self._packets = self._descriptor(NAME)
        self._by_number = np.empty(0, np.int64), np.empty(0, np.int64)

    @property
    def next_row(self) -> int:
        """Rows from this one on are not valid yet."""
        return max(next_row_in(self._commits), self._header.next_row)

    @property
    def first_row(self) -> int:
        """Rows below this one were deleted."""
        return self._header.first_row

    def is_current(self) -> bool:
        """Return whether the table still has this header."""
        try:
            return os.stat(self._header_path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def is_calm(self) -> bool:
        """Return whether no row is being overwritten."""
        return os.fstat(self._redo).st_size <= MIN_BYTES

    def find(self, rows: Array) -> Any:
        """Return the slot of each row, and whether it is in the table."""
        numbers = self.numbers
        slots = rows % len(numbers)
        found: Array = numbers[slots] == rows
        if not found.all():
            self._search(rows, slots, found)
        return slots, found & (rows >= self.first_row) & (rows < self.next_row)

    def _search(self, rows: Array, slots: Array, found: Array) -> None:
        """Find rows that are not in the slot that they have while no row is deleted."""
        for is_new in (False, True):
            if is_new:
                numbers = np.array(self.numbers)
                order = np.argsort(numbers, kind='stable')
                self._by_number = numbers[order], order
            numbers, order = self._by_number
            missing = np.flatnonzero(~found)
            if not len(order) or not len(missing):
                continue
            places = np.minimum(np.searchsorted(numbers, rows[missing]), len(order) - 1)
            slots[missing] = order[places]
            found[missing] = self.numbers[slots[missing]] == rows[missing]

    def copy(self, slots: Array, is_padded: bool) -> _Copied:
        """Copy the elements of these slots, whatever they hold."""
        arrays = {name: column.read(slots) for name, column in self._columns.items()}
        if self.layout is None:
            return _Copied(arrays, arrays, np.ones(len(slots), bool))
        places, sizes = arrays[PLACE], arrays[BYTES]
        ends = places + np.maximum(sizes, 0)
        if ends.max(initial=0) > len(self._view):
            self._map_packets()
        num_bytes, is_sound = self.layout.sizes(arrays, places, sizes, len(self._view))
        read = self.layout.padded if is_padded else self.layout.rows
        return _Copied(arrays, {**arrays, **read(self._view, arrays, places, num_bytes, is_sound)}, is_sound)

    def is_same(self, slots: Array, arrays: Mapping[str, Array]) -> bool:
        """Return whether the columns of these slots are those that were copied."""
        return all(self._columns[name].read(slots).tobytes() == array.tobytes() for name, array in arrays.items())

    def packet(self, row: int, place: int, arrays: Mapping[str, Array]) -> Packet:
        """Return the packet of a row that is at one place of copied columns."""
        start, size = int(arrays[PLACE][place]), int(arrays[BYTES][place])
        is_within = 0 <= start <= start + size <= len(self._view)
        data = self._view[start : start + size] if is_within else np.empty(0, np.uint8)
        return Packet(row, data, int(arrays[CHECKSUM][place]))

    def _map_packets(self) -> None:
        num_bytes = os.fstat(self._packets).st_size
        if num_bytes > len(self._view):
            self._view = np.frombuffer(mmap.mmap(self._packets, num_bytes, access=mmap.ACCESS_READ), np.uint8)

    def _column(self, column: StoredColumn) -> Column:
        spec = np.dtype(column.dtype), tuple(column.shape)
        num_bytes = spec_bytes(spec) * self._header.capacity
        data: Any = self._mapped(column.file, num_bytes) if num_bytes else b''
        array = np.frombuffer(data, spec[0]).reshape(self._header.capacity, *spec[1])
        return Column(array) if column.encoding is None else NarrowColumn(array)

    def _mapped(self, name: str, num_bytes: int) -> mmap.mmap:
        descriptor = private_files.opener(self._file(name), os.O_RDONLY)
        try:
            if os.fstat(descriptor).st_size < num_bytes:
                raise CorruptPayload(f'{self._file(name)!r} is shorter than {num_bytes} bytes')
            return mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)

    def _descriptor(self, name: str) -> int:
        descriptor = private_files.opener(self._file(name), os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _file(self, name: str) -> str:
        return os.path.join(self._path, name)


def no_table(path: str) -> ConfigError:
    """Return the error for a directory without a table."""
    return ConfigError(f'{path!r} holds no table. Create it first, with MemoryBank(size, path=...).')


def _schema_of(path: str, header: TableHeader) -> Optional[Schema]:
    """
    Overview:
        Return the schema of a table's elements, or None if it has none yet.
    Raises:
        - ConfigError: The elements are in a form that only their owner reads.
        - CorruptPayload: The header is damaged.
    """
    if header.info is None or not header.columns:
        return None
    if any(column.frames is not None for column in header.columns):
        raise ConfigError(f'{path!r} shares frames, which only its owner reads. Create it with share_frames=False.')
    if isinstance(header.info, dict) and header.info.keys() == {'packed'}:
        raise ConfigError(f'{path!r} holds packed elements, which only their owner reads. Push elements of one schema.')
    try:
        schema = Schema.from_json(header.info)
    except SchemaMismatch as e:
        raise CorruptPayload(f'the header in {path!r} holds no valid schema of elements: {e}') from e
    if {*specs_of(schema)} != {column.name for column in header.columns}:
        raise CorruptPayload(f'the header in {path!r} names other columns than those of its schema')
    return schema
