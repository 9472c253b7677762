"""Writes of a table: new rows become visible all at once, and rows are overwritten whole."""

from __future__ import annotations

from typing import Any, Mapping, Optional, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.interrupts import finish
from ding_store.buffer.persistence.commits import encode_note
from ding_store.buffer.table.columns import TableColumns
from ding_store.buffer.table.durability import Durability
from ding_store.buffer.table.fork_guard import ForkGuard
from ding_store.buffer.table.rows import RowIndex
from ding_store.buffer.table.specs import Columns
from ding_store.errors import SchemaMismatch


class RowWrites:
    """
    Overview:
        Adds and overwrites rows of a table, in an order that a kill, an exception or a forked process may interrupt. It
        shares these parts with the table. The caller holds the table's write lock.
    """

    def __init__(self, index: RowIndex, columns: TableColumns, durability: Durability, guard: ForkGuard) -> None:
        self._index, self._columns, self._durability, self._guard = index, columns, durability, guard

    def allocate(self, num_rows: int) -> Tuple[Array, Array]:
        """
        Overview:
            Reserve slots and space for new rows. The oldest rows are evicted if there is no room.
        Returns:
            - slots (:obj:`np.ndarray`): The slots.
            - evicted (:obj:`np.ndarray`): Row numbers of the evicted rows.
        """
        self._guard.check_open()
        index = self._index
        with index.lock:
            self.count_frames()
        if self._columns.shared:
            # Without the lock of the index: samples go on while frames move to a file, which may take minutes.
            self._columns.reserve_frames(num_rows)
        try:
            with index.lock:
                if index.promised_row > index.next_row:
                    index.next_row = index.promised_row
                is_full = index.count + num_rows > index.capacity
                self._columns.reserve(index.capacity if is_full else index.count + num_rows)
                if is_full:
                    self._guard.announce()
                slots, evicted = index.allocate(num_rows)
            if len(evicted):
                # Sync before the first byte of the rows that replace the evicted ones.
                self._durability.sync_numbers()
        except BaseException:
            finish(self._durability.sync_numbers)  # Rows may have left, and the next push overwrites their bytes.
            raise
        return slots, evicted

    def allocate_one(self) -> int:
        """Reserve a slot and space for one new row, like ``allocate``, without the fixed cost of array operations."""
        index, columns = self._index, self._columns
        if columns.shared:
            return int(self.allocate(1)[0][0])
        self._guard.check_open()
        try:
            with index.lock:
                if index.promised_row > index.next_row:
                    index.next_row = index.promised_row
                is_full = index.count == index.capacity
                columns.reserve(index.capacity if is_full else index.count + 1)
                if is_full:
                    self._guard.announce()
                slot = index.allocate_one()
            if is_full:
                # Sync before the first byte of the row that replaces the evicted one.
                self._durability.sync_numbers()
        except BaseException:
            finish(self._durability.sync_numbers)  # As in ``allocate``.
            raise
        return slot

    def publish_one(self, slot: int) -> int:
        """Make one written slot visible, like ``publish``. Return its row number."""
        self._durability.sync_columns()
        row = self._index.next_row
        try:
            self._durability.mark_one(slot, row)
            with self._index.lock:
                self._index.publish_one(slot, row)
            self._durability.commit_rows(None, None)
        except BaseException:
            if self._index.row_of_slot[slot] == row:
                finish(lambda: self._durability.commit_rows(None, None))
            raise
        if self._columns.shared:
            self._columns.are_frames_counted = True
        return row

    def publish(
        self, slots: Array, skipped: int = 0, note: Optional[Mapping[str, Any]] = None, encoded: Optional[bytes] = None
    ) -> None:
        """Make written slots visible as rows. ``TableDirectory`` explains the order of the steps."""
        self._durability.sync_columns()
        first = self._index.next_row + skipped
        try:
            self._durability.mark(slots, first)
            with self._index.lock:
                self._index.publish(slots, skipped)
            self._durability.commit_rows(note, encoded)
        except BaseException:
            if len(slots) and self._index.row_of_slot[slots[0]] == first:
                finish(lambda: self._durability.commit_rows(note, encoded))
            raise
        if self._columns.shared:
            self._columns.are_frames_counted = True

    def count_frames(self) -> None:
        """Count the references to frames anew if an interruption left wrong counts. The caller locks the index."""
        if not self._columns.are_frames_counted:
            self._columns.recount(self._index.live_slots)

    def take_back(self, slots: Array, evicted: Array) -> None:
        """Undo ``allocate``, before anything was written."""
        with self._index.lock:
            self._index.restore(slots, evicted)
        self._index.promised_row = self._index.next_row

    def overwrite(self, rows: Array, slots: Array, columns: Columns) -> None:
        """Write to rows in place. The columns come from ``TableShape.as_stored``."""

        def write() -> None:
            self._guard.announce()
            self._columns.overwrite(slots, columns)

        self._guard.check_open()
        self._columns.reserve_frames(len(slots), columns)
        self._durability.overwrite(rows, columns, write)

    def writing(self, num_rows: int, skipped: int, note: Optional[Mapping[str, Any]]) -> Writing:
        """Return the context of ``Table.writing``."""
        return Writing(self, self._index, num_rows, skipped, note)


class Writing:
    """Context manager of ``Table.writing``. A class, because a generator takes a microsecond longer."""

    __slots__ = ('_encoded', '_evicted', '_index', '_note', '_num_rows', '_skipped', '_slots', '_writes')

    def __init__(
        self, writes: RowWrites, index: RowIndex, num_rows: int, skipped: int, note: Optional[Mapping[str, Any]]
    ) -> None:
        self._writes, self._index = writes, index
        self._num_rows, self._skipped, self._note = num_rows, skipped, note
        self._encoded = None if note is None else encode_note(note)

    def __enter__(self) -> Tuple[Array, Array]:
        self._slots, self._evicted = self._writes.allocate(self._num_rows)
        first = self._index.next_row + self._skipped
        self._index.promised_row = first + self._num_rows
        return self._slots, np.arange(first, first + self._num_rows, dtype=np.int64)

    def __exit__(self, kind: Optional[type[BaseException]], error: object, traceback: object) -> None:
        if kind is None:
            self._writes.publish(self._slots, self._skipped, self._note, self._encoded)
        elif issubclass(kind, SchemaMismatch):
            self._writes.take_back(self._slots, self._evicted)
