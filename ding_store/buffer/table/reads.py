"""The part of a table that is read: without waiting for writers, and never a torn row."""

from __future__ import annotations

from typing import Callable, Dict, Mapping, Optional, Tuple, TypeVar

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.table.narrowing import gather, take_into
from ding_store.buffer.table.row_choices import by_rows
from ding_store.buffer.table.rows import RowIndex
from ding_store.buffer.table.table_base import TableBase

T = TypeVar('T')
Choose = Callable[[RowIndex], Array]

#: A read that raced with a writer is redone so often before it makes the writers wait.
_OPTIMISTIC_READS = 3
#: So little is copied with the index locked, some 20 us, which costs writers less than it does to look twice.
_QUICK_BYTES = 1 << 18


class TableReads(TableBase):
    """See ``Table``."""

    def gather(self, rows: Array, out: Optional[Mapping[str, Array]] = None) -> Dict[str, Array]:
        """
        Overview:
            Read rows by row number, in the order asked; one gather per column, O(len(rows)).
        Arguments:
            - rows (:obj:`np.ndarray`): Row numbers ``(B,)``.
            - out (:obj:`Optional[Mapping]`): Arrays ``(B, *shape)`` to fill; fresh ones by default.
        Raises:
            - RowGone: A row left the table, or never existed; names the first.
        """
        return self.read(by_rows(rows), lambda slots: self.take(slots, out))[1]

    def read(self, choose: Choose, copy: Callable[[Array], T], is_all: bool = True) -> Tuple[Array, T]:
        """
        Overview:
            Copy rows that no writer touched meanwhile.
        Arguments:
            - choose (:obj:`Callable`): RowIndex -> slots of live rows; called with the index locked, and again after
              a race.
            - copy (:obj:`Callable`): Slots -> what was copied from them, without any lock, but for very little.
            - is_all (:obj:`bool`): Whether it copies no more than the columns have.
        Returns:
            - rows (:obj:`np.ndarray`): Row numbers of the slots.
            - copied: What the last ``copy`` returned.
        Raises:
            - StoreClosed: See ``check_unchanged``.
        """
        if self._owner is not None:
            return self._read_unchanged(choose, copy, is_all)
        return self._read(choose, copy, is_all)

    def _read_unchanged(self, choose: Choose, copy: Callable[[Array], T], is_all: bool) -> Tuple[Array, T]:
        """In a forked process whose parent may change what is read."""
        self.check_unchanged()
        try:
            found = self._read(choose, copy, is_all)
        except Exception:
            self.check_unchanged()  # Else rows that changed meanwhile led to it.
            raise
        self.check_unchanged()
        return found

    def _read(self, choose: Choose, copy: Callable[[Array], T], is_all: bool) -> Tuple[Array, T]:
        for _ in range(_OPTIMISTIC_READS):
            with self.index.lock:
                slots, numbers = choose(self.index), self.index.row_of_slot
                rows, num_updates = numbers.take(slots, mode='clip'), self._num_updates
                if is_all and len(slots) * self._regions.row_bytes <= _QUICK_BYTES:
                    # Whoever changes a row that lives, or takes it away, has this lock.
                    return rows, copy(slots)
            try:
                with self._regions.reading(slots):
                    copied = copy(slots)
            except (KeyError, TypeError, ValueError):
                if num_updates == self._num_updates:
                    raise
                continue  # Columns became others in the middle of it.
            # The row number guards against a new row in the slot, the count against new data in the row, and against
            # other columns or slots. Both are changed before the first byte is, and whoever reads them here has the
            # interpreter's lock.
            if _are_at(self.index, numbers, slots, rows) and num_updates == self._num_updates:
                return rows, copied
        with self.write_lock:
            with self.index.lock:
                slots = choose(self.index)
            return self.index.row_of_slot[slots], copy(slots)

    def take(self, slots: Array, out: Optional[Mapping[str, Array]] = None) -> Dict[str, Array]:
        """Copy slots of all columns, whatever they hold: only right as the ``copy`` of a ``read``."""
        columns, cold = self.sources
        if out is None and cold:
            out = {name: np.empty((len(slots), *shape), dtype) for name, (dtype, shape) in self.specs.items()}
        if out is None:
            fresh = {}
            for name, column in columns.items():
                is_narrow = self._dtype_of(name, column) != column.dtype
                fresh[name] = gather(column, slots, None) if is_narrow else column.take(slots, 0, None, 'clip')
            return fresh
        for name, array in out.items():
            take_into(columns[name], slots, array, cold.get(name))
        return dict(out)


def _are_at(index: RowIndex, numbers: Array, slots: Array, rows: Array) -> bool:
    if index.kernels is None:
        return bool((numbers[slots] == rows).all())
    return index.kernels.are_at(numbers, np.ascontiguousarray(slots, np.int64), rows)
