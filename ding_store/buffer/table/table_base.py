"""The state that all parts of a table share: columns, index, files, locks, and checks for forked processes."""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any, Dict, List, Mapping, Optional, Set

import numpy as np

from ding_store.buffer.arguments import integer
from ding_store.buffer.array_types import Array
from ding_store.buffer.forks import hold_over_forks, tell_of_forks
from ding_store.buffer.persistence import redo_record
from ding_store.buffer.persistence.commits import encode_note
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.table.column_memory import ColumnSpec
from ding_store.buffer.table.columns import TableColumns, checked_specs
from ding_store.buffer.table.row_choices import as_rows
from ding_store.buffer.table.rows import RowIndex
from ding_store.errors import SchemaMismatch, StoreClosed


class TableBase:
    """State and basic queries of a ``Table``."""

    def __init__(
        self, columns: Mapping[str, ColumnSpec], capacity: int, path: Optional[str] = None, fsync: bool = False
    ) -> None:
        specs = checked_specs(columns)
        self.write_lock = hold_over_forks(threading.RLock())
        self._num_updates = 0
        #: Row numbers below this one may have metas on disk, for rows that never became live.
        self._promised_row = 0
        self._watchers: List[List[Array]] = []
        self._note: Optional[Dict[str, Any]] = None
        #: Number of changes to existing rows, shared with forked processes. None before the first fork.
        self._num_changes: Optional[Array] = None
        self._num_changes_at_fork = 0
        self._process = os.getpid()
        #: The process that owns the table's files, if this process was forked from it. Its changes are not visible
        #: here.
        self._owner: Optional[int] = None
        self._is_torn = self._is_child_of_owner = False
        capacity = integer('capacity', capacity, 1)
        self.table_dir = None if path is None else TableDirectory(path, capacity, fsync)
        self.columns = TableColumns(capacity, self.table_dir)
        try:
            self._open(specs, capacity)
        except BaseException:
            self.columns.close()
            if self.table_dir is not None:
                self.table_dir.close()
            raise
        tell_of_forks(self)

    def _open(self, specs: Dict[str, ColumnSpec], capacity: int) -> None:
        table_dir = self.table_dir
        if table_dir is None:
            self.index = RowIndex(capacity)
        else:
            self.index = RowIndex(capacity, table_dir.numbers, table_dir.next_row)
            self._note = table_dir.note
        if table_dir is None or not table_dir.header.columns:
            self.columns.add(specs)
            self._describe(self.info)
            return
        self.columns.open(table_dir.header.columns, int(self.index.live_slots.max(initial=-1)) + 1)
        if specs and specs != self.columns.specs:
            raise SchemaMismatch(f'{table_dir.path!r} holds a table of the columns {self.columns.specs}, not {specs}')
        self._redo(table_dir)

    @property
    def capacity(self) -> int:
        """The maximum number of rows."""
        return self.index.capacity

    @property
    def info(self) -> Any:
        """JSON that the creator stored about the columns. None for a private table."""
        return None if self.table_dir is None else self.table_dir.header.info

    @property
    def committed(self) -> Optional[Dict[str, Any]]:
        """The note that was committed last."""
        return self._note

    @property
    def num_updates(self) -> int:
        """
        A counter that grows before existing rows change or move. If it grew since a read, the values read may be
        outdated.
        """
        return self._num_updates

    def __len__(self) -> int:
        return self.index.count

    @property
    def row_bytes(self) -> int:
        """Payload bytes of one row."""
        return self.columns.row_bytes

    @property
    def next_row(self) -> int:
        """The number of the next row."""
        return max(self.index.next_row, self._promised_row)

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
            self._commit(note, encoded)

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

    def check_unchanged(self) -> None:
        """
        Overview:
            Check in a forked process that the rows are still those of the fork, if the parent owns the table's files.
        Raises:
            - StoreClosed: The parent changed rows. Or it has exited, so that another process may change them.
        """
        if self._owner is None:
            return
        self._refuse_torn()
        if self._num_changes is None or self._num_changes[0] != self._num_changes_at_fork or not self._owner_lives():
            raise StoreClosed(
                f'the buffer of process {self._owner} cannot be read in this forked process any more: it is in files, '
                'and rows were removed or replaced since the fork. Sample it in that process, or create a buffer here.'
            )

    def check_open(self) -> None:
        """
        Overview:
            Check that this process may change the table.
        Raises:
            - StoreClosed: The table was closed, or belongs to the process from which this one was forked.
        """
        if self._owner is not None:
            self._refuse_torn()
            raise StoreClosed(
                f'the buffer of process {self._owner} cannot be changed in this forked process: its files are '
                'read-only here. Change it in that process, or create a buffer here.'
            )
        if self.table_dir is not None:
            self.table_dir.check_open()

    def _refuse_torn(self) -> None:
        if self._is_torn:
            raise StoreClosed(
                f'the buffer of process {self._owner} cannot be used in this forked process: a thread was changing it '
                'during the fork. Fork while no thread changes it, or create a buffer here.'
            )

    def _owner_lives(self) -> bool:
        """Return whether it is certain that no other process opened the files."""
        assert self._owner is not None
        if self.table_dir is None or os.getppid() == self._owner:
            return True
        if self._is_child_of_owner:
            return False
        try:
            os.kill(self._owner, 0)
        except OSError:
            return False
        return True

    def before_fork(self) -> None:
        if self._owner is None and self._is_in_files:
            if self._num_changes is None:
                self._num_changes = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)
            self._num_changes_at_fork = int(self._num_changes[0])

    def after_fork(self, missed: Set[int]) -> None:
        self._is_child_of_owner = self._owner is None
        if id(self.write_lock) in missed or id(self.index.lock) in missed:
            self._is_torn = True
        if self._owner is None and (self._is_torn or self._is_in_files):
            self._owner = self._process
        self._process = os.getpid()

    @property
    def _is_in_files(self) -> bool:
        """True if forked processes share the contents of the columns."""
        return self.table_dir is not None or self.columns.has_files

    def _change(self) -> None:
        """Announce to forked processes that existing rows will change or leave: their reads fail from now on."""
        if self._num_changes is not None:
            self._num_changes[0] += 1

    def check(self) -> List[str]:
        """
        Overview:
            Look for inconsistencies. For tests and post-mortems: there are none unless memory or files were damaged.
        Returns:
            - findings (:obj:`List[str]`): One sentence per inconsistency.
        """
        with self.write_lock, self.index.lock:
            found = self.index.findings()
            if self.index.count and int(self.index.live_slots.max()) >= self.columns.num_used:
                found.append(f'a row is in a slot beyond {self.columns.num_used}, the last that was written')
            found += self.columns.findings(self.capacity)
            if self.table_dir is not None:
                found += self.table_dir.findings(self.index.next_row, self.index.row_of_slot, self.columns.stored())
        return found

    def close(self) -> None:
        """Release the files. The table is empty afterwards, but the files in ``path`` keep its rows."""
        with self.write_lock, self.index.lock:
            if self.table_dir is None:
                self.index.clear()
            else:
                self._sync_columns()
                self._change()  # Other processes may open the files now.
                self.table_dir.close()
                self._num_updates += 1
                # Do not clear the row numbers in place: that would delete all rows on the disk as well.
                self.index.forget()
            self.columns.close()

    def _commit(self, note: Optional[Mapping[str, Any]], encoded: Optional[bytes]) -> None:
        if self.table_dir is not None:
            self.table_dir.check_open()
            self.table_dir.commit(self.index.next_row, encoded)
        if note is not None:
            self._note = dict(note)

    def _redo(self, table_dir: TableDirectory) -> None:
        for record in table_dir.redo.read():
            rows, columns = redo_record.decode(record, self.columns.stored())
            with self.index.lock:
                slots, found = self.index.find(rows)
            self.columns.overwrite(slots[found], {name: values[found] for name, values in columns.items()})
        self._sync_columns()
        table_dir.redo.clear()

    def _describe(self, info: Any) -> None:
        """Write a header that names the current columns. With ``fsync`` their bytes reach the disk first."""
        if self.table_dir is not None:
            self._sync_new(self.columns)
            self.table_dir.describe(self.columns.stored(), info)

    def _sync_numbers(self) -> None:
        if self.table_dir is not None:
            self.table_dir.sync_numbers()

    def _sync_new(self, columns: TableColumns) -> None:
        if self.table_dir is not None and self.table_dir.fsync:
            columns.sync()

    def _sync_kept(self) -> None:
        if self.table_dir is not None and self.table_dir.fsync:
            self.table_dir.sync_kept()

    def _sync_columns(self) -> None:
        if self.table_dir is not None and self.table_dir.fsync:
            self.columns.sync()
            self.table_dir.metas.sync()
