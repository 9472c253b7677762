"""The table of the replay: it adds, overwrites and deletes rows in memory-mapped columns, in any element layout."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any, Callable, Collection, Dict, Iterator, List, Mapping, Optional, Tuple, TypeVar

import numpy as np

from ding_store.buffer.arguments import integer
from ding_store.buffer.array_types import Array
from ding_store.buffer.forks import hold_over_forks
from ding_store.buffer.interrupts import finish
from ding_store.buffer.persistence.commits import encode_note
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.table.columns import TableColumns
from ding_store.buffer.table.durability import Durability
from ding_store.buffer.table.fork_guard import ForkGuard
from ding_store.buffer.table.reads import Choose, ConsistentReads
from ding_store.buffer.table.row_choices import as_rows, by_rows
from ding_store.buffer.table.rows import RowIndex
from ding_store.buffer.table.shape import TableShape
from ding_store.buffer.table.specs import Columns, ColumnSpec, check_columns, checked_specs
from ding_store.buffer.table.writes import RowWrites, Writing

T = TypeVar('T')
#: Receives the slots and the row numbers of rows just before they become live.
Keep = Callable[[Array, Array], None]


class Table:
    """
    Overview:
        A struct of arrays ``[capacity, *shape]`` that holds the newest rows. Any number of threads may read and write.
        Writers take turns. Readers do not wait for writers. They compare the row numbers before and after a copy, and
        repeat the copy if a writer changed its rows.

        ``index`` knows the rows and their slots, and ``columns`` the values. ``shape`` changes the columns or the
        capacity. ``table_dir`` is the directory of a table that survives its process.
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

    def __init__(
        self,
        columns: Mapping[str, ColumnSpec],
        capacity: int,
        path: Optional[str] = None,
        fsync: bool = False,
        share_frames: bool = False,
    ) -> None:
        specs, capacity = checked_specs(columns), integer('capacity', capacity, 1)
        self.write_lock = hold_over_forks(threading.RLock())
        self._watchers: List[List[Array]] = []
        table_dir = self.table_dir = None if path is None else TableDirectory(path, capacity, fsync)
        self.columns = TableColumns(capacity, table_dir, share_frames)
        try:
            if table_dir is None:
                self.index = RowIndex(capacity)
            else:
                self.index = RowIndex(capacity, table_dir.numbers, table_dir.next_row)
            self._durability = Durability(table_dir, self.index, self.columns)
            self._durability.open(specs)
        except BaseException:
            self.columns.close()
            if table_dir is not None:
                table_dir.close()
            raise
        self._guard = ForkGuard(self.columns, table_dir, (self.write_lock, self.index.lock))
        self._reads = ConsistentReads(self.index, self.columns, self.write_lock)
        parts = self.index, self.columns, self._durability, self._guard
        self._writes = RowWrites(*parts)
        self.shape = TableShape(*parts, self._reads, self.write_lock)

    @property
    def capacity(self) -> int:
        """The maximum number of rows."""
        return self.index.capacity

    @property
    def info(self) -> Any:
        """JSON that the creator stored about the columns. None for a private table."""
        return self._durability.info

    @property
    def committed(self) -> Optional[Dict[str, Any]]:
        """The note that was committed last."""
        return self._durability.note

    @property
    def num_updates(self) -> int:
        """
        A counter that grows before existing rows change or move. If it grew since a read, the values read may be
        outdated.
        """
        return self._reads.num_updates

    @property
    def next_row(self) -> int:
        """The number of the next row."""
        return max(self.index.next_row, self.index.promised_row)

    def __len__(self) -> int:
        return self.index.count

    def contains(self, rows: Array) -> Array:
        """Return whether each row is in the table, bool."""
        with self.index.lock:
            found = self.index.find(as_rows(rows))[1]
        self.check_unchanged()
        return found

    def rows_by_age(self) -> Array:
        """Return the row numbers of all live rows, oldest first."""
        with self.index.lock:
            rows = self.index.row_of_slot[self.index.slots_by_age()]
        self.check_unchanged()
        return rows

    def gather(self, rows: Array, out: Optional[Mapping[str, Array]] = None) -> Dict[str, Array]:
        """
        Overview:
            Read rows by row number, in the given order. One gather per column, O(len(rows)).
        Arguments:
            - rows (:obj:`np.ndarray`): Row numbers ``(B,)``.
            - out (:obj:`Optional[Mapping]`): Arrays ``(B, *shape)`` to fill. Fresh ones by default.
        Raises:
            - RowGone: A row left the table or never existed. The message names the first one.
        """
        return self.read(by_rows(rows), lambda slots: self.columns.take(slots, out))[1]

    def read(self, choose: Choose, copy: Callable[[Array], T], is_all: bool = True) -> Tuple[Array, T]:
        """
        Overview:
            Copy rows such that no writer changed them during the copy.
        Arguments:
            - choose (:obj:`Callable`): RowIndex -> slots of live rows. Called with the index locked, and again after a
              race.
            - copy (:obj:`Callable`): Slots -> the copied values. Called without a lock, unless the copy is small.
            - is_all (:obj:`bool`): Whether ``copy`` reads at most the columns.
        Returns:
            - rows (:obj:`np.ndarray`): Row numbers of the slots.
            - copied: What the last ``copy`` returned.
        Raises:
            - StoreClosed: The rows changed since a fork, see ``check_unchanged``.
        """
        if self._guard.owner is not None:
            return self._guard.unchanged(lambda: self._reads.read(choose, copy, is_all))
        return self._reads.read(choose, copy, is_all)

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
            - columns (:obj:`Mapping`): Name -> array ``(n, *shape)``, or ``FrameReferences``, for exactly the columns
              of the table.
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
        num_rows = check_columns(self.columns.specs, columns, narrowed=narrowed)
        skipped = max(0, num_rows - self.capacity)
        with self.write_lock:
            self.check_open()
            columns = self.shape.as_stored(columns, narrowed, as_references=True)
            with self._writes.writing(num_rows - skipped, skipped, note) as (slots, rows):
                self.columns.store(slots, columns, skipped)
                if keep is not None:
                    keep(slots, rows)
            self.shape.judge_sharing()
        return np.arange(rows[-1] + 1 - num_rows, rows[-1] + 1) if skipped else rows

    def writing(self, num_rows: int, skipped: int = 0, note: Optional[Mapping[str, Any]] = None) -> Writing:
        """
        Overview:
            Return a context in which the caller writes new rows in place. It yields their slots and row numbers. The
            caller holds ``write_lock``. The rows become visible when the context exits. After a SchemaMismatch, which
            means that nothing was written, the table is unchanged. After any other exception the rows never become
            visible, but the rows evicted for them stay evicted.
        """
        return self._writes.writing(num_rows, skipped, note)

    def add_one(self, write: Callable[[int], None]) -> Tuple[int, int]:
        """
        Overview:
            Add one row without a note, like ``writing``. ``write`` fills the given slot and must not fail.
        Returns:
            - slot (:obj:`int`): The slot of the row.
            - row (:obj:`int`): The row number.
        """
        with self.write_lock:
            slot = self._writes.allocate_one()
            is_shared = bool(self.columns.shared)
            if is_shared:
                self.columns.are_frames_counted = False
            write(slot)
            row = self._writes.publish_one(slot)
            if is_shared:
                self.shape.judge_sharing()
        return slot, row

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
        check_columns(self.columns.specs, columns, len(wanted), partial=True)
        # The index lock is held as well, so that no reader starts in the middle of the update.
        with self.write_lock, self.index.lock:
            self._reads.repeat()
            self._writes.count_frames()
            for changed in self._watchers:
                changed.append(wanted)
            slots, found = self.index.find(wanted)
            held = self.shape.as_stored({name: values[found] for name, values in columns.items()})
            if found.any():
                self._writes.overwrite(wanted[found], slots[found], held)
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
                self._guard.announce()
            try:
                self.index.remove(freed)
                self._durability.sync_numbers()
            except BaseException:
                finish(self._durability.sync_numbers)  # Rows may have left, and the next push overwrites their bytes.
                raise
        return freed

    def clear(self) -> None:
        """Delete all rows. A kill meanwhile deletes all or none. Row numbers are not used again."""

        def clear() -> None:
            self._guard.announce()
            self._durability.clear()
            self.index.clear()
            self._durability.sync_numbers()

        with self.write_lock, self.index.lock:
            self.check_open()
            finish(clear)

    def commit(self, note: Mapping[str, Any]) -> None:
        """
        Overview:
            Set ``committed`` without adding rows.
        Raises:
            - SchemaMismatch: The note cannot be encoded as JSON.
        """
        encoded = encode_note(note)
        with self.write_lock:
            self.check_open()
            self._durability.commit(note, encoded)

    def check_open(self) -> None:
        """Check that this process may change the table, see ``ForkGuard.check_open``."""
        self._guard.check_open()

    def check_unchanged(self) -> None:
        """Check in a forked process that the rows are those of the fork, see ``ForkGuard.check_unchanged``."""
        self._guard.check_unchanged()

    def check(self) -> List[str]:
        """
        Overview:
            Look for inconsistencies. For tests and post-mortems: there are none unless memory or files were damaged.
        Returns:
            - findings (:obj:`List[str]`): One sentence per inconsistency.
        """
        with self.write_lock, self.index.lock:
            self._writes.count_frames()
            found = self.index.findings() + self.columns.findings(self.index)
            return found + self._durability.findings()

    def close(self) -> None:
        """Release the files. The table is empty afterwards, but the files in ``path`` keep its rows."""
        with self.write_lock, self.index.lock:
            if self.table_dir is None:
                self.index.clear()
            else:
                self._durability.sync_columns()
                self._guard.announce()  # Other processes may open the files now.
                self.table_dir.close()
                self._reads.repeat()
                # Do not clear the row numbers in place: that would delete all rows on the disk as well.
                self.index.forget()
            self.columns.close()
