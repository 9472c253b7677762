"""Row numbers at which a process or a file ended. No sequence or episode continues over one of them."""

from __future__ import annotations

import logging
import os
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.errors import NotEnoughSpace

logger = logging.getLogger(__name__)

#: A row number, and True if every later episode begins there because the source of the earlier rows has ended.
Break = Tuple[int, bool]


def as_breaks(value: Any) -> List[Break]:
    """
    Overview:
        Convert breaks from JSON.
    Raises:
        - TypeError, ValueError: The value does not hold breaks.
    """
    if not isinstance(value, list):
        raise TypeError(f'{value!r:.80} is not a list of breaks')
    breaks: List[Break] = []
    for row, begins in value:
        if type(row) is not int or not 0 <= row < 1 << 63 or type(begins) is not bool:
            raise ValueError(f'{[row, begins]!r:.80} is not a break')
        breaks.append((row, begins))
    return breaks


class Breaks:
    """
    Overview:
        The breaks of one table, in ascending order. A table with a path records them, for each generation of its rows.
        See ``TableDirectory``. The caller holds the table's lock.
    Arguments:
        - table_dir (:obj:`Optional[TableDirectory]`): The table's directory.
    """

    def __init__(self, table_dir: Optional[TableDirectory]) -> None:
        self._table_dir, self._is_new = table_dir, False
        self._rows, self._begin = np.empty(0, np.int64), np.empty(0, bool)
        if table_dir is not None and os.path.exists(table_dir.file('breaks.record')):
            record = table_dir.record('breaks', of_rows=False)
            try:
                self._set(as_breaks((record.value or {}).get(str(table_dir.generation), [])))
            except (TypeError, ValueError) as e:
                raise record.damaged(e) from e

    def __len__(self) -> int:
        return len(self._rows)

    def segments(self, rows: Array) -> Array:
        """Return the number of breaks at or before each row."""
        counts: Array = np.searchsorted(self._rows, rows, side='right')
        return counts

    def begin_episodes(self, segments: Array) -> Array:
        """Return whether every episode begins with its segment, for segment numbers of ``segments``."""
        begin: Array = np.concatenate([[True], self._begin])[segments]
        return begin

    def list(self) -> List[Break]:
        return list(zip(self._rows.tolist(), self._begin.tolist()))

    def add(self, breaks: Sequence[Break], oldest: int) -> None:
        """
        Overview:
            Add breaks. Remove breaks that have no live row before them.
        Arguments:
            - oldest (:obj:`int`): The oldest live row.
        """
        self._set([each for each in [*self.list(), *breaks] if each[0] > oldest])
        if self._table_dir is not None:
            try:
                self._put({str(self._table_dir.generation): self.list()})
            except NotEnoughSpace as e:
                logger.warning("A later process may sample sequences that cross this one's first row: %s", e)

    def prepare(self, breaks: Sequence[Break]) -> None:
        """
        Overview:
            Record the breaks that will hold once all rows are replaced, next to the current ones.
        Raises:
            - NotEnoughSpace: The disk is full.
        """
        if self._table_dir is not None:
            self._is_new = not os.path.exists(self._table_dir.file('breaks.record'))
            generation = self._table_dir.generation
            self._put({str(generation): self.list(), str(generation + 1): list(breaks)})

    def take_back(self) -> None:
        """Undo ``prepare``, because the rows were not replaced."""
        if self._table_dir is not None and self._is_new:
            self._table_dir.remove_record('breaks')

    def replace(self, breaks: Sequence[Break]) -> None:
        """Set the breaks of the new rows, after all rows were replaced."""
        self._is_new = False
        self._set(breaks)

    def _put(self, value: Any) -> None:
        assert self._table_dir is not None
        if any(value.values()) or os.path.exists(self._table_dir.file('breaks.record')):
            record = self._table_dir.record('breaks', of_rows=False)
            record.put(value)
            if self._table_dir.fsync:
                record.sync()

    def _set(self, breaks: Sequence[Any]) -> None:
        # If a row has several breaks, the last one tells if episodes begin there.
        known = {int(row): bool(begins) for row, begins in breaks}
        self._rows = np.array(sorted(known), np.int64)
        self._begin = np.array([known[row] for row in sorted(known)], bool)
