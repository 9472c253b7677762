"""The table of the replay: it adds, overwrites and deletes rows in memory-mapped columns, in any element layout."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Collection, Iterator, List, Mapping, Optional, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.interrupts import finish
from ding_store.buffer.persistence import redo_record
from ding_store.buffer.persistence.commits import encode_note
from ding_store.buffer.table.columns import Columns
from ding_store.buffer.table.reads import TableReads
from ding_store.buffer.table.row_choices import as_rows
from ding_store.buffer.table.shape import TableShape
from ding_store.errors import SchemaMismatch

#: Receives the slots and the row numbers of rows just before they become live.
Keep = Callable[[Array, Array], None]


class Table(TableReads, TableShape):
    """
    Overview:
        A struct of arrays ``[capacity, *shape]`` that holds the newest rows. Any number of threads may read and write.
        Writers take turns. Readers do not wait for writers. They compare the row numbers before and after a copy, and
        repeat the copy if a writer changed its rows.
    Arguments:
        - columns (:obj:`Mapping`): Name -> (dtype, shape of one element). May be empty, for rows kept elsewhere.
        - capacity (:obj:`int`): The maximum number of rows. The oldest rows are evicted when there are more.
        - path (:obj:`Optional[str]`): Directory of a table that survives its process, see ``TableDirectory``. An
          existing table is opened again. None for a private table.
        - fsync (:obj:`bool`): Whether the table also survives power cuts. This costs a few fsyncs per push.
    Raises:
        - ConfigError: ``capacity`` is not a positive integer or differs from that of the table in ``path``, or a dtype
          has no fixed size.
        - SchemaMismatch: ``columns`` are given, and the table in ``path`` has others.
        - TableLocked, FormatMismatch, CorruptPayload: As in ``TableDirectory``. Nothing was changed.
    """

    def extend(
        self,
        columns: Columns,
        note: Optional[Mapping[str, Any]] = None,
        keep: Optional[Keep] = None,
        narrowed: Collection[str] = (),
    ) -> Array:
        """
        Overview:
            Add rows with one copy per column. Of more rows than the capacity only the last are stored.
        Arguments:
            - columns (:obj:`Mapping`): Name -> array ``(n, *shape)`` for exactly the columns of the table.
            - note (:obj:`Optional[Mapping]`): The value of ``committed`` from the moment when these rows become live.
            - keep (:obj:`Optional[Keep]`): Called before that moment, to record what must be on disk when the rows are
              live.
            - narrowed (:obj:`Collection[str]`): Names of float32 columns that are passed as bytes, see ``narrowing``.
        Returns:
            - rows (:obj:`np.ndarray`): Row numbers ``(n,)``, int64.
        Raises:
            - SchemaMismatch: A column is missing, unknown, or of another dtype, shape or length. Nothing was added.
            - NotEnoughSpace: The disk is full. Nothing was added.
        """
        num_rows = self.columns.check(columns, narrowed=narrowed)
        skipped = max(0, num_rows - self.capacity)
        with self.write_lock:
            self.check_open()
            columns = self.as_stored(columns, narrowed)
            with self.writing(num_rows - skipped, skipped, note) as (slots, rows):
                self.columns.store(slots, columns, skipped)
                if keep is not None:
                    keep(slots, rows)
        return np.arange(rows[-1] + 1 - num_rows, rows[-1] + 1) if skipped else rows

    def writing(self, num_rows: int, skipped: int = 0, note: Optional[Mapping[str, Any]] = None) -> Writing:
        """
        Overview:
            Return a context in which the caller writes new rows in place. It yields their slots and row numbers. The
            caller holds ``write_lock``. The rows become visible when the context exits. After a SchemaMismatch, which
            means that nothing was written, the table is unchanged. After any other exception the rows never become
            visible, but the rows evicted for them stay evicted.
        """
        return Writing(self, num_rows, skipped, note)

    def add_one(self, write: Callable[[int], None]) -> Tuple[Array, int]:
        """
        Overview:
            Add one row without a note, like ``writing``. ``write`` fills the given slot and must not fail.
        Returns:
            - slots (:obj:`np.ndarray`): The slot of the row, ``(1,)``.
            - row (:obj:`int`): The row number.
        """
        with self.write_lock:
            slots, _ = self._allocate(1, 0)
            row = self.index.next_row
            write(int(slots[0]))
            self._publish(slots, 0)
        return slots, row

    def update(self, rows: Array, columns: Columns) -> Array:
        """
        Overview:
            Overwrite rows in all columns or in some. Rows that are no longer in the table are skipped.
        Arguments:
            - columns (:obj:`Mapping`): Name -> array ``(len(rows), *shape)``.
        Returns:
            - found (:obj:`np.ndarray`): Whether each row was in the table, bool.
        """
        wanted = as_rows(rows)
        self.columns.check(columns, len(wanted), partial=True)
        # The index lock is held as well, so that no reader starts in the middle of the update.
        with self.write_lock, self.index.lock:
            self._num_updates += 1
            for changed in self._watchers:
                changed.append(wanted)
            slots, found = self.index.find(wanted)
            held = self.as_stored({name: values[found] for name, values in columns.items()})
            if found.any():
                self._overwrite(wanted[found], slots[found], held)
        return found

    @contextmanager
    def watching(self) -> Iterator[List[Array]]:
        """Yield a list that collects the row numbers of every ``update`` before its first byte changes."""
        changed: List[Array] = []
        try:
            with self.write_lock:
                self._watchers.append(changed)
            yield changed
        finally:
            with self.write_lock:
                self._watchers = [each for each in self._watchers if each is not changed]

    def delete(self, rows: Array) -> Array:
        """
        Overview:
            Delete rows in O(len(rows)). Rows that are no longer in the table are skipped.
        Returns:
            - slots (:obj:`np.ndarray`): The freed slots.
        """
        with self.write_lock, self.index.lock:
            self.check_open()
            slots, found = self.index.find(np.unique(as_rows(rows)))
            freed = slots[found]
            if len(freed):
                self._change()
            self.index.remove(freed)
            self._sync_numbers()
        return freed

    def _allocate(self, num_rows: int, skipped: int) -> Tuple[Array, Array]:
        self.check_open()
        with self.index.lock:
            if self._promised_row > self.index.next_row:
                self.index.next_row = self._promised_row
            self.columns.reserve(min(self.capacity, self.index.count + num_rows))
            if self.index.count + num_rows > self.capacity:
                self._change()
            slots, evicted = self.index.allocate(num_rows)
        if len(evicted):
            # Sync before the first byte of the rows that replace the evicted ones.
            self._sync_numbers()
        return slots, evicted

    def _publish(
        self, slots: Array, skipped: int, note: Optional[Mapping[str, Any]] = None, encoded: Optional[bytes] = None
    ) -> None:
        """Make written slots visible as rows. ``TableDirectory`` explains the order of the steps."""
        self._sync_columns()
        first = self.index.next_row + skipped
        try:
            if self.table_dir is not None:
                self.table_dir.mark(slots, first)
            with self.index.lock:
                self.index.publish(slots, skipped)
            self._commit_rows(note, encoded)
        except BaseException:
            if len(slots) and self.index.row_of_slot[slots[0]] == first:
                finish(lambda: self._commit_rows(note, encoded))
            raise

    def _commit_rows(self, note: Optional[Mapping[str, Any]], encoded: Optional[bytes]) -> None:
        self._sync_numbers()
        # Samplers received the rows when they were published, and may have stored initial values for them.
        self._sync_kept()
        self._commit(note, encoded)

    def _overwrite(self, rows: Array, slots: Array, columns: Columns) -> None:
        """Write to rows in place. If an exception or a kill interrupts the write, it is repeated."""

        def write() -> None:
            self._change()
            self.columns.overwrite(slots, columns)

        self.check_open()
        if self.table_dir is None:
            finish(write)
            return
        table_dir, record = self.table_dir, [redo_record.encode(rows, columns)]
        table_dir.redo.reserve(record)

        def write_on_record() -> None:
            table_dir.redo.append(record)
            table_dir.redo.sync()
            write()
            self._sync_columns()
            table_dir.redo.clear()

        finish(write_on_record)


class Writing:
    """Context manager of ``Table.writing``. A class, because a generator takes a microsecond longer."""

    __slots__ = ('_encoded', '_evicted', '_note', '_num_rows', '_skipped', '_slots', '_table')

    def __init__(self, table: Table, num_rows: int, skipped: int, note: Optional[Mapping[str, Any]]) -> None:
        self._table, self._num_rows, self._skipped, self._note = table, num_rows, skipped, note
        self._encoded = None if note is None else encode_note(note)

    def __enter__(self) -> Tuple[Array, Array]:
        self._slots, self._evicted = self._table._allocate(self._num_rows, self._skipped)
        first = self._table.index.next_row + self._skipped
        self._table._promised_row = first + self._num_rows
        return self._slots, np.arange(first, first + self._num_rows, dtype=np.int64)

    def __exit__(self, kind: Optional[type[BaseException]], error: object, traceback: object) -> None:
        if kind is None:
            self._table._publish(self._slots, self._skipped, self._note, self._encoded)
        elif issubclass(kind, SchemaMismatch):
            index = self._table.index
            with index.lock:
                index.restore(self._slots, self._evicted)
            self._table._promised_row = index.next_row
