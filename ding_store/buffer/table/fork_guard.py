"""Checks of a table in forked processes: whether its rows are still those of the fork, and whether it may change."""

from __future__ import annotations

import mmap
import os
from typing import Any, Callable, Optional, Set, Tuple, TypeVar

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.forks import tell_of_forks
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.table.columns import TableColumns
from ding_store.errors import StoreClosed

T = TypeVar('T')


class ForkGuard:
    """
    Overview:
        Refuses what a forked process must not do with the table of its parent. Rows in files are shared: the process
        may read them until the parent changes or removes one, and may not change any. Rows in memory are its own.
    Arguments:
        - columns (:obj:`TableColumns`): The columns of the table.
        - table_dir (:obj:`Optional[TableDirectory]`): Directory of the table, or None for a private table.
        - locks (:obj:`Tuple`): The locks that threads hold while they change the table.
    """

    def __init__(self, columns: TableColumns, table_dir: Optional[TableDirectory], locks: Tuple[Any, ...]) -> None:
        self._columns, self._table_dir, self._locks = columns, table_dir, locks
        #: The process that owns the table's files, if this process was forked from it. Its changes are not visible
        #: here.
        self.owner: Optional[int] = None
        #: Number of changes to existing rows, shared with forked processes. None before the first fork.
        self._num_changes: Optional[Array] = None
        self._num_changes_at_fork = 0
        self._process = os.getpid()
        self._is_torn = self._is_child_of_owner = False
        tell_of_forks(self)

    def announce(self) -> None:
        """Announce to forked processes that existing rows will change or leave: their reads fail from now on."""
        if self._num_changes is not None:
            self._num_changes[0] += 1

    def check_open(self) -> None:
        """
        Overview:
            Check that this process may change the table.
        Raises:
            - StoreClosed: The table was closed, or belongs to the process from which this one was forked.
        """
        if self.owner is not None:
            self._refuse_torn()
            raise StoreClosed(
                f'the buffer of process {self.owner} cannot be changed in this forked process: its files are '
                'read-only here. Change it in that process, or create a buffer here.'
            )
        if self._table_dir is not None:
            self._table_dir.check_open()

    def check_unchanged(self) -> None:
        """
        Overview:
            Check in a forked process that the rows are still those of the fork, if the parent owns the table's files.
        Raises:
            - StoreClosed: The parent changed rows. Or it has exited, so that another process may change them.
        """
        if self.owner is None:
            return
        self._refuse_torn()
        if self._num_changes is None or self._num_changes[0] != self._num_changes_at_fork or not self._owner_lives():
            raise StoreClosed(
                f'the buffer of process {self.owner} cannot be read in this forked process any more: it is in files, '
                'and rows were removed or replaced since the fork. Sample it in that process, or create a buffer here.'
            )

    def unchanged(self, read: Callable[[], T]) -> T:
        """Return the result of a read during which ``check_unchanged`` held."""
        self.check_unchanged()
        try:
            found = read()
        except Exception:
            self.check_unchanged()  # The error may be due to rows that changed meanwhile.
            raise
        self.check_unchanged()
        return found

    def before_fork(self) -> None:
        if self.owner is None and self._is_in_files:
            if self._num_changes is None:
                self._num_changes = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)
            self._num_changes_at_fork = int(self._num_changes[0])

    def after_fork(self, missed: Set[int]) -> None:
        self._is_child_of_owner = self.owner is None
        if any(id(lock) in missed for lock in self._locks):
            self._is_torn = True
        if self.owner is None and (self._is_torn or self._is_in_files):
            self.owner = self._process
        self._process = os.getpid()

    @property
    def _is_in_files(self) -> bool:
        """True if forked processes share the contents of the columns."""
        return self._table_dir is not None or self._columns.has_files

    def _refuse_torn(self) -> None:
        if self._is_torn:
            raise StoreClosed(
                f'the buffer of process {self.owner} cannot be used in this forked process: a thread was changing it '
                'during the fork. Fork while no thread changes it, or create a buffer here.'
            )

    def _owner_lives(self) -> bool:
        """Return whether it is certain that no other process opened the files."""
        assert self.owner is not None
        if self._table_dir is None or os.getppid() == self.owner:
            return True
        if self._is_child_of_owner:
            return False
        try:
            os.kill(self.owner, 0)
        except OSError:
            return False
        return True
