"""Reads of a table: they do not wait for writers and never return a torn row."""

from __future__ import annotations

import threading
from typing import Callable, Tuple, TypeVar

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.table.columns import TableColumns
from ding_store.buffer.table.rows import RowIndex

T = TypeVar('T')
Choose = Callable[[RowIndex], Array]

#: Number of attempts of a read that races with writers. The next attempt blocks the writers.
_OPTIMISTIC_READS = 3
#: Up to this size, about 20 us, a copy happens under the index lock. This costs writers less than a second look.
QUICK_BYTES = 1 << 18


class ConsistentReads:
    """
    Overview:
        Copies rows without a lock, and repeats the copy if a writer changed them meanwhile.
    Arguments:
        - index (:obj:`RowIndex`): The rows of the table.
        - columns (:obj:`TableColumns`): The columns of the table.
        - write_lock (:obj:`RLock`): The lock that writers hold. The last attempt of a read holds it.
    """

    def __init__(self, index: RowIndex, columns: TableColumns, write_lock: threading.RLock) -> None:
        self._index, self._columns, self._write_lock = index, columns, write_lock
        #: Grows before existing rows change or move, and before columns are replaced.
        self.num_updates = 0

    def repeat(self) -> None:
        """Make readers that are copying repeat their reads. Call it before the first byte changes."""
        self.num_updates += 1

    def read(self, choose: Choose, copy: Callable[[Array], T], is_all: bool) -> Tuple[Array, T]:
        """Copy rows, see ``Table.read``."""
        index, columns = self._index, self._columns
        for _ in range(_OPTIMISTIC_READS):
            with index.lock:
                slots, numbers = choose(index), index.row_of_slot
                rows, num_updates = numbers.take(slots, mode='clip'), self.num_updates
                if is_all and len(slots) * columns.row_bytes <= QUICK_BYTES:
                    # A thread that changes or removes a live row holds this lock.
                    return rows, copy(slots)
            try:
                with columns.reading(slots):
                    copied = copy(slots)
            except (KeyError, TypeError, ValueError):
                if num_updates == self.num_updates:
                    raise
                continue  # The columns were replaced during the copy.
            # The row numbers reveal new rows in the slots. The count of updates reveals new data in the rows, other
            # columns or other slots. Both change before the first byte does, and the interpreter's lock orders the
            # reads here after those changes.
            if _are_at(index, numbers, slots, rows) and num_updates == self.num_updates:
                return rows, copied
        with self._write_lock:
            with index.lock:
                slots = choose(index)
            return index.row_of_slot[slots], copy(slots)


def _are_at(index: RowIndex, numbers: Array, slots: Array, rows: Array) -> bool:
    if index.kernels is None:
        return bool((numbers[slots] == rows).all())
    return index.kernels.are_at(numbers, np.ascontiguousarray(slots, np.int64), rows)
