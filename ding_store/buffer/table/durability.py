"""The writes by which a table survives its process, and a power cut with ``fsync``. A private table needs none."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence

import numpy as np

from ding_store.buffer.array_types import Array, filled
from ding_store.buffer.interrupts import finish
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.persistence import redo_record
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.persistence.table_header import StoredColumn
from ding_store.buffer.table.columns import TableColumns
from ding_store.buffer.table.rows import RowIndex
from ding_store.buffer.table.specs import Columns, ColumnSpec
from ding_store.errors import SchemaMismatch


class Durability:
    """
    Overview:
        Stores in a table's directory what its columns do not hold, in the order that ``TableDirectory`` explains.
        Without a directory most methods do nothing.
    Arguments:
        - table_dir (:obj:`Optional[TableDirectory]`): The directory, or None for a private table.
        - index (:obj:`RowIndex`): The rows of the table.
        - columns (:obj:`TableColumns`): The columns of the table.
    """

    def __init__(self, table_dir: Optional[TableDirectory], index: RowIndex, columns: TableColumns) -> None:
        self._table_dir, self._index, self._columns = table_dir, index, columns
        self._fsync = table_dir is not None and table_dir.fsync
        #: The note that was committed last.
        self.note: Optional[Dict[str, Any]] = None if table_dir is None else table_dir.note

    @property
    def info(self) -> Any:
        """JSON that the creator stored about the columns. None for a private table."""
        return None if self._table_dir is None else self._table_dir.header.info

    @property
    def numbers(self) -> Optional[Array]:
        """The array of row numbers that is in the directory, or None."""
        return None if self._table_dir is None else self._table_dir.numbers

    def open(self, specs: Dict[str, ColumnSpec]) -> None:
        """
        Overview:
            Map the columns of the directory, or create these if it has none. Complete what a kill interrupted.
        Raises:
            - SchemaMismatch: The directory has other columns.
        """
        table_dir, columns = self._table_dir, self._columns
        if table_dir is None or not table_dir.header.columns:
            columns.add(specs)
            self.describe(self.info)
            return
        columns.open(table_dir.header.columns, self._index.live_slots)
        if specs and specs != columns.specs:
            raise SchemaMismatch(f'{table_dir.path!r} holds a table of the columns {columns.specs}, not {specs}')
        self.redo()

    def mark(self, slots: Array, first_row: int) -> None:
        """Store the checksums of rows that are about to be in these slots."""
        if self._table_dir is not None:
            self._table_dir.mark(slots, first_row)

    def mark_one(self, slot: int, row: int) -> None:
        """Store the checksum of a row that is about to be in this slot."""
        if self._table_dir is not None:
            self._table_dir.mark_one(slot, row)

    def commit_rows(self, note: Optional[Mapping[str, Any]], encoded: Optional[bytes]) -> None:
        """Make published rows valid, together with a note."""
        if self._fsync:
            self.sync_numbers()
            # Samplers received the rows when they were published, and may have stored initial values for them.
            self.sync_kept()
        self.commit(note, encoded)

    def commit(self, note: Optional[Mapping[str, Any]], encoded: Optional[bytes]) -> None:
        if self._table_dir is not None:
            self._table_dir.check_open()
            self._table_dir.commit(self._index.next_row, encoded)
        if note is not None:
            self.note = dict(note)

    def overwrite(self, rows: Array, columns: Columns, write: Callable[[], None]) -> None:
        """Overwrite rows in place by ``write``. If an exception or a kill interrupts it, it is repeated."""
        if self._table_dir is None:
            finish(write)
            return
        redo, record = self._table_dir.redo, [redo_record.encode(rows, columns)]
        redo.reserve(record)

        def write_on_record() -> None:
            redo.append(record)
            redo.sync()
            write()
            self.sync_columns()
            redo.clear()

        finish(write_on_record)

    def redo(self) -> None:
        """Repeat an ``overwrite`` that a kill interrupted."""
        assert self._table_dir is not None
        for record in self._table_dir.redo.read():
            rows, columns = redo_record.decode(record, self._columns.stored_columns())
            with self._index.lock:
                slots, found = self._index.find(rows)
            columns = {name: values[found] for name, values in columns.items()}
            self._columns.reserve_frames(len(slots[found]), columns)
            self._columns.overwrite(slots[found], columns)
        self.sync_columns()
        self._table_dir.redo.clear()

    def clear(self) -> None:
        """Delete all rows of the directory."""
        if self._table_dir is not None:
            self._table_dir.clear()

    def describe(self, info: Any) -> None:
        """Write a header that names the current columns. With ``fsync`` their bytes reach the disk first."""
        if self._table_dir is not None:
            self.sync_new(self._columns)
            self._table_dir.describe(self._columns.stored_columns(), info)

    def describing(self, made: Sequence[StoredColumn], info: Any) -> Callable[[], None]:
        """
        Overview:
            Return a function that writes a header with other columns, which have the places of the present ones of
            their names by then.
        Raises:
            - NotEnoughSpace: The disk is full. Nothing changed.
        """
        if self._table_dir is None:
            return _nothing
        others = {each.name: each for each in made}
        columns = [others.get(each.name, each) for each in self._columns.stored_columns()]
        commit = self._table_dir.prepare(columns, info)

        def describe() -> None:
            self.sync_new(self._columns)
            commit()

        return describe

    def prepare(self, others: TableColumns, info: Any) -> Callable[[], None]:
        """Return the function that makes other columns valid, with the same rows."""
        if self._table_dir is None:
            return _nothing
        self.sync_new(others)
        return self._table_dir.prepare(others.stored_columns(), info)

    def replacing(
        self, others: TableColumns, info: Any, rows: Array, next_row: int, metas: Iterable[bytes]
    ) -> Callable[[], None]:
        """Return the function that makes other columns valid, with these rows instead of all others."""
        index = self._index
        if self._table_dir is None or (not len(rows) and not index.count and next_row <= index.next_row):
            return self.prepare(others, info)
        self.sync_new(others)
        return self._table_dir.replacing(others.stored_columns(), info, rows, next_row, metas)

    def resizing(self, capacity: int) -> Callable[[], Array]:
        """Return the function that changes the capacity and returns the array of row numbers."""
        if self._table_dir is not None:
            return self._table_dir.resizing(capacity, self._columns.stored_columns(capacity))
        numbers = filled(capacity, EMPTY, np.int64)

        def resize() -> Array:
            kept = min(capacity, self._index.capacity)
            numbers[:kept] = self._index.row_of_slot[:kept]
            return numbers

        return resize

    def move_values(self, source: Array, target: Array) -> None:
        """Copy what is stored per slot to the slots to which rows are about to move."""
        if self._table_dir is not None:
            self._table_dir.move_values(source, target)

    def sync_numbers(self) -> None:
        if self._fsync:
            assert self._table_dir is not None
            self._table_dir.sync_numbers()

    def sync_kept(self) -> None:
        """Write the state of samplers to the disk."""
        if self._fsync:
            assert self._table_dir is not None
            self._table_dir.sync_kept()

    def sync_columns(self) -> None:
        """Write columns and metas to the disk."""
        if self._fsync:
            assert self._table_dir is not None
            self._columns.sync()
            self._table_dir.metas.sync()

    def sync_new(self, columns: TableColumns) -> None:
        """Write columns that a header is about to name to the disk."""
        if self._fsync:
            columns.sync()

    def findings(self) -> List[str]:
        """Return the differences between the files and the table in memory."""
        if self._table_dir is None:
            return []
        return self._table_dir.findings(self._index.next_row, self._index.row_of_slot, self._columns.stored_columns())


def _nothing() -> None:
    pass
