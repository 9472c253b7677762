"""Memory of the columns: anonymous memory, or sparse files whose space is reserved before it is written."""

from __future__ import annotations

import mmap
import os
from contextlib import nullcontext
from math import prod
from typing import Callable, Collection, ContextManager, Dict, Iterable, List, Mapping, NamedTuple, Optional

import numpy as np

from ding_store import free_space
from ding_store.buffer.array_types import Array, anonymous
from ding_store.buffer.interrupts import finish
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.persistence.table_header import StoredColumn
from ding_store.buffer.table.column_files import ColumnFile, ColumnFiles
from ding_store.buffer.table.disk_reads import LARGE_ROW_BYTES, DiskReads
from ding_store.buffer.table.page_touching import Toucher
from ding_store.buffer.table.specs import ColumnSpec, spec_bytes
from ding_store.errors import NotEnoughSpace

#: Step in which space is reserved. Reserving 64 MiB took 33 ms on tmpfs and 0.3-8 ms on ext4. On tmpfs the first touch
#: became shorter by as much: 60 + 33 ms, against 101-135 ms without a reservation.
EXTENT_BYTES = 16 << 20
#: Upper limit of a step of two pushes, which is used if two pushes are larger than ``EXTENT_BYTES``.
_MAX_AHEAD_BYTES = 64 << 20

_NOT_WATCHED = nullcontext()


class Replacement(NamedTuple):
    """
    Overview:
        A converted column that is complete, and not in use yet.
    Arguments:
        - in_header (:obj:`StoredColumn`): The new column in the form of a directory's header.
        - replace (:obj:`Callable`): Puts it in the place of the old column. May be called again.
        - discard (:obj:`Callable`): Deletes it instead.
    """

    in_header: StoredColumn
    replace: Callable[[], None]
    discard: Callable[[], None]


class ColumnMemory:
    """
    Overview:
        The columns of one table, each ``[capacity, *shape]``, mapped once and sparse. With ``table_dir=None`` they are
        private. Private columns are in anonymous memory if all fit in a share of it, and cgroup limits count. Otherwise
        they are in unlinked files, in the directory with the most free space.
    Arguments:
        - capacity (:obj:`int`): The number of rows.
        - table_dir (:obj:`Optional[TableDirectory]`): Directory of the files, or None for private columns.
        - grows (:obj:`bool`): Whether it is unknown how many slots will be used. Private columns then begin in memory,
          and must move to files when they outgrow it, see ``outgrows_memory``.
        - what (:obj:`str`): What the rows are, for error messages.
    """

    def __init__(
        self, capacity: int, table_dir: Optional[TableDirectory] = None, grows: bool = False, what: str = 'rows'
    ) -> None:
        self.capacity, self._grows, self._what = capacity, grows, what
        self._files = ColumnFiles(table_dir, None if table_dir is None else table_dir.path)
        #: By the name of the column. Columns in memory and columns without bytes have none.
        self._file_of: Dict[str, ColumnFile] = {}
        self.disk_reads = DiskReads(self._file_of)
        self.columns: Dict[str, Array] = {}
        self._num_reserved = 0
        #: So many slots fit in memory when that was looked at last.
        self._num_fitting = 0
        #: Number of slots that the last ``reserve`` requested.
        self._num_asked = 0
        # No touching ahead in a table directory: every touched page would be written to the disk by the next sync.
        self._toucher = Toucher() if table_dir is None else None

    @property
    def columns(self) -> Dict[str, Array]:
        """The columns, indexed by slot. A new dict whenever a column is replaced."""
        return self._columns

    @columns.setter
    def columns(self, columns: Dict[str, Array]) -> None:
        self._columns = columns
        self.disk_reads.forget()
        self.row_bytes = sum(column.itemsize * prod(column.shape[1:]) for column in columns.values())

    def add(self, specs: Mapping[str, ColumnSpec], num_used: int = 0) -> None:
        """
        Overview:
            Map more columns, with rows of zeros. If one of them fails, none is added.
        Arguments:
            - num_used (:obj:`int`): The number of slots that must be writable.
        Raises:
            - NotEnoughSpace: There is no space for the reserved rows of these columns.
        """
        if self._files.directory is None and not self.columns and not self._grows:
            num_bytes = self.capacity * sum(map(spec_bytes, specs.values()))
            self._files.directory = free_space.private_directory(num_bytes)
        added: Dict[str, Array] = {}
        files: Dict[str, ColumnFile] = {}
        try:
            for name, spec in specs.items():
                added[name] = self._map(name, spec, files)
            # Reserve from slot 0: the new files have no reserved space yet.
            self._reserve(files, 0, max(self._num_reserved, num_used))
        except BaseException:
            self._discard(files)
            raise

        def add() -> None:
            self._file_of.update(files)
            # Build a new dict, because readers may be iterating over the old one.
            self.columns = {**self.columns, **added}

        finish(add)

    @property
    def has_files(self) -> bool:
        """True if forked processes share the contents of the columns."""
        return bool(self._file_of)

    def take_back(self, names: Iterable[str]) -> None:
        """Undo ``add``: remove these columns and their files."""
        files = {name: self._file_of.pop(name) for name in names if name in self._file_of}
        self.columns = {name: array for name, array in self.columns.items() if name not in names}
        self._discard(files)

    def open(self, columns: List[StoredColumn], num_used: int) -> None:
        """
        Overview:
            Map the columns of an existing directory.
        Arguments:
            - num_used (:obj:`int`): Number of slots that may hold rows. Their space is reserved again, because a copied
              file may have holes.
        Raises:
            - NotEnoughSpace: A file has holes, and the disk is full.
        """
        opened = {}
        for column in columns:
            spec = np.dtype(column.dtype), tuple(column.shape)
            if spec_bytes(spec) * self.capacity:
                self._file_of[column.name] = self._files.open(column.file, spec_bytes(spec))
            opened[column.name] = self._array(column.name, spec)
        self._reserve(self._file_of, 0, num_used)
        self._num_reserved = num_used
        self.columns = opened

    def stored_columns(self) -> List[StoredColumn]:
        """Return the columns in the form of a directory's header."""
        return [
            StoredColumn(
                name, array.dtype.str, list(array.shape[1:]), self._file_of[name].name if name in self._file_of else ''
            )
            for name, array in self.columns.items()
        ]

    def replacing(
        self,
        name: str,
        spec: ColumnSpec,
        convert: Callable[[Array, Array], None],
        num_used: int,
        directory: Optional[str] = None,
    ) -> Replacement:
        """
        Overview:
            Convert a column into new memory, or into a new file. It is complete when this returns. A private column
            that does not fit in memory goes to a file.
        Arguments:
            - convert (:obj:`Callable`): Called with some rows of the old column, and with their places in the new one.
            - num_used (:obj:`int`): Slots from this one on hold nothing.
            - directory (:obj:`Optional[str]`): A private column in memory goes to a file there, even if it fits.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        files: Dict[str, ColumnFile] = {}
        former = self._files.directory
        if former is None:
            self._files.directory = directory or free_space.private_directory(self.capacity * spec_bytes(spec))
        try:
            made = self._map(name, spec, files)
            self._reserve(files, 0, max(self._num_reserved, num_used))
            step = max(1, EXTENT_BYTES // max(1, spec_bytes(spec)))
            for start in range(0, num_used, step):
                end = min(num_used, start + step)
                convert(self.columns[name][start:end], made[start:end])
        except BaseException:
            self._files.directory = former
            self._discard(files)
            raise

        olds = [self._file_of[name].fd] if name in self._file_of else []

        def replace() -> None:
            self._file_of.update(files)
            self.columns = {**self.columns, name: made}
            while olds:
                os.close(olds.pop())

        stored = StoredColumn(name, made.dtype.str, list(made.shape[1:]), files[name].name if name in files else '')
        return Replacement(stored, replace, lambda: self._discard(files))

    def outgrows_memory(self, num_used: int, num_rows: int) -> bool:
        """
        Overview:
            Return whether private columns are in memory, and ``num_rows`` slots would take too much of it. They should
            move to files then, see ``replacing``.
        Arguments:
            - num_used (:obj:`int`): The number of slots that take memory already.
        """
        if num_rows <= self._num_fitting or self._file_of:
            return False
        memory = num_used * self.row_bytes + free_space.available_memory()
        if num_rows * self.row_bytes <= free_space.GROWN_SHARE * memory:
            self._num_fitting = num_rows + max(1, EXTENT_BYTES // max(1, self.row_bytes))
            return False
        return True

    def stay_in_memory(self, num_used: int, num_rows: int) -> bool:
        """
        Overview:
            Keep columns in memory that have outgrown it, because the disk is full. Return False if memory is used up.
        Arguments:
            - num_used (:obj:`int`): The number of slots that take memory already.
            - num_rows (:obj:`int`): The number of slots that are needed.
        """
        # As much may be touched in advance.
        if (num_rows - num_used) * self.row_bytes + _MAX_AHEAD_BYTES > free_space.available_memory():
            return False
        # Until then, the disk may have room again.
        self._num_fitting = num_rows + max(1, EXTENT_BYTES // max(1, self.row_bytes))
        return True

    def drop(self, names: Iterable[str]) -> None:
        """Remove these columns. Readers that hold their arrays can continue to read them."""
        names = set(names)
        self.columns = {name: array for name, array in self.columns.items() if name not in names}
        for name in names & set(self._file_of):
            os.close(self._file_of.pop(name).fd)

    def move(self, source: Array, target: Array) -> None:
        """Copy ``source`` slots to ``target`` slots."""
        step = max(1, EXTENT_BYTES // max(1, self.row_bytes))
        for column in self.columns.values():
            for start in range(0, len(source), step):
                column[target[start : start + step]] = column[source[start : start + step]]

    def resizing(self, capacity: int) -> Callable[[int], None]:
        """
        Overview:
            Map more or fewer slots. The returned function makes them the columns, and keeps the contents of the first
            ``num_used`` slots. It cannot fail and may be called again. Files are not truncated: a reader of a truncated
            page would be killed by SIGBUS.
        """
        for file in self._file_of.values():
            file.lengthen(capacity)
        made = {
            name: self._array(name, (column.dtype, column.shape[1:]), capacity=capacity)
            for name, column in self.columns.items()
        }

        def resize(num_used: int) -> None:
            self._stop_touching()
            for name, column in self.columns.items():
                if name not in self._file_of:
                    made[name][:num_used] = column[:num_used]
            self.capacity, self.columns = capacity, made
            self._num_reserved = min(self._num_reserved, capacity)
            for file in self._file_of.values():
                file.free_from(capacity)

        return resize

    def sync(self, names: Optional[Collection[str]] = None) -> None:
        """Write all bytes of the files to the disk, or those of some columns."""
        for name, file in self._file_of.items():
            if names is None or name in names:
                os.fdatasync(file.fd)

    def reading(self, columns: Mapping[str, Array], slots: Array) -> ContextManager[None]:
        """Return a context for a copy of these slots of columns that a reader holds, see ``DiskReads``."""
        if self.row_bytes < LARGE_ROW_BYTES or self._files.directory is None:
            return _NOT_WATCHED
        return self.disk_reads.watched(columns, slots)

    def reserve(self, num_rows: int) -> None:
        """
        Overview:
            Make the first ``num_rows`` slots writable, and some slots beyond them. A thread touches the latter in
            advance if the table is private.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing was written.
        """
        pushed, self._num_asked = num_rows - self._num_asked, num_rows
        reserved = self._num_reserved
        if reserved == self.capacity:
            return
        row_bytes = max(1, self.row_bytes)
        step = max(1, EXTENT_BYTES // row_bytes, min(2 * pushed, _MAX_AHEAD_BYTES // row_bytes))
        if num_rows + step // 2 <= reserved:
            return
        ahead = min(self.capacity, num_rows + step)
        try:
            self._reserve(self._file_of, reserved, ahead)
        except NotEnoughSpace:
            # Free what each column has reserved in advance, to make room for the others.
            ahead = max(num_rows, reserved)
            for file in self._file_of.values():
                file.free_from(ahead)
            self._reserve(self._file_of, reserved, ahead)
        self._num_reserved = ahead
        if self._toucher is not None:
            self._toucher.touch(self.columns.values(), max(num_rows, reserved), ahead)

    def close(self) -> None:
        """Close the files. Readers that hold the arrays can continue to read them."""
        self._stop_touching()
        self.drop([*self.columns, *self._file_of])

    def discard(self) -> None:
        """Delete columns and files that no header names yet."""
        self._stop_touching()
        self.take_back([*self.columns, *self._file_of])

    def _stop_touching(self) -> None:
        if self._toucher is not None:
            self._toucher.stop()

    def _map(self, name: str, spec: ColumnSpec, files: Dict[str, ColumnFile]) -> Array:
        num_bytes = self.capacity * spec_bytes(spec)
        if num_bytes and self._files.directory is not None:
            file = files[name] = self._files.create(spec_bytes(spec), [each.name for each in files.values()])
            file.lengthen(self.capacity)
        return self._array(name, spec, files)

    def _array(
        self,
        name: str,
        spec: ColumnSpec,
        files: Optional[Dict[str, ColumnFile]] = None,
        capacity: Optional[int] = None,
    ) -> Array:
        dtype, shape = np.dtype(spec[0]), tuple(spec[1])
        capacity = self.capacity if capacity is None else capacity
        num_bytes = capacity * spec_bytes(spec)
        if num_bytes == 0:
            return np.zeros((capacity, *shape), dtype)
        file = (self._file_of if files is None else files).get(name)
        region = anonymous(num_bytes) if file is None else mmap.mmap(file.fd, num_bytes)
        return np.frombuffer(region, dtype).reshape((capacity, *shape))

    def _discard(self, files: Dict[str, ColumnFile]) -> None:
        for file in files.values():
            self._files.delete(file)

    def _reserve(self, files: Mapping[str, ColumnFile], start: int, stop: int) -> None:
        for file in files.values():
            if not file.reserve(start, stop):
                assert self._files.directory is not None
                purpose = f'{self._what} {start} to {stop} of at most {self.capacity}'
                needed = (stop - start) * sum(each.row_bytes for each in files.values())
                raise free_space.not_enough_space(purpose, needed, self._files.directory)
