"""Reads of a table: they do not wait for writers and never return a torn row."""

from __future__ import annotations

from typing import Callable, Dict, Mapping, Optional, Tuple, TypeVar

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.table.row_choices import by_rows
from ding_store.buffer.table.rows import RowIndex
from ding_store.buffer.table.table_base import TableBase

T = TypeVar('T')
Choose = Callable[[RowIndex], Array]

#: Number of attempts of a read that races with writers. The next attempt blocks the writers.
_OPTIMISTIC_READS = 3
#: Up to this size, about 20 us, a copy happens under the index lock. This costs writers less than a second look.
_QUICK_BYTES = 1 << 18


class TableReads(TableBase):
    """The operations of a ``Table`` that read rows."""

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
        if self._owner is not None:
            return self._read_unchanged(choose, copy, is_all)
        return self._read(choose, copy, is_all)

    def _read_unchanged(self, choose: Choose, copy: Callable[[Array], T], is_all: bool) -> Tuple[Array, T]:
        """Read in a forked process whose parent may change the rows."""
        self.check_unchanged()
        try:
            found = self._read(choose, copy, is_all)
        except Exception:
            self.check_unchanged()  # The error may be due to rows that changed meanwhile.
            raise
        self.check_unchanged()
        return found

    def _read(self, choose: Choose, copy: Callable[[Array], T], is_all: bool) -> Tuple[Array, T]:
        for _ in range(_OPTIMISTIC_READS):
            with self.index.lock:
                slots, numbers = choose(self.index), self.index.row_of_slot
                rows, num_updates = numbers.take(slots, mode='clip'), self._num_updates
                if is_all and len(slots) * self.columns.row_bytes <= _QUICK_BYTES:
                    # A thread that changes or removes a live row holds this lock.
                    return rows, copy(slots)
            try:
                with self.columns.reading(slots):
                    copied = copy(slots)
            except (KeyError, TypeError, ValueError):
                if num_updates == self._num_updates:
                    raise
                continue  # The columns were replaced during the copy.
            # The row numbers reveal new rows in the slots. The count of updates reveals new data in the rows, other
            # columns or other slots. Both change before the first byte does, and the interpreter's lock orders the
            # reads here after those changes.
            if _are_at(self.index, numbers, slots, rows) and num_updates == self._num_updates:
                return rows, copied
        with self.write_lock:
            with self.index.lock:
                slots = choose(self.index)
            return self.index.row_of_slot[slots], copy(slots)


def _are_at(index: RowIndex, numbers: Array, slots: Array, rows: Array) -> bool:
    if index.kernels is None:
        return bool((numbers[slots] == rows).all())
    return index.kernels.are_at(numbers, np.ascontiguousarray(slots, np.int64), rows)
