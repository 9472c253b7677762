"""The row number of each slot in a table's directory, with a checksum."""

from __future__ import annotations

import mmap
from typing import List

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.persistence.journal import map_file
from ding_store.buffer.persistence.row_checksums import RowChecksums


class RowNumbers:
    """
    Overview:
        Two mapped files. ``numbers`` is the array on which the index works.
    Arguments:
        - path (:obj:`str`): The file of row numbers.
        - marks_path (:obj:`str`): The file of checksums.
        - capacity (:obj:`int`): The number of slots.
        - fsync (:obj:`bool`): Whether checksums must be on the disk before row numbers.
    """

    def __init__(self, path: str, marks_path: str, capacity: int, fsync: bool) -> None:
        self._path, self._marks_path, self._fsync = path, marks_path, fsync
        self._map(map_file(path, 8 * capacity), RowChecksums(map_file(marks_path, 8 * capacity), capacity), capacity)

    @classmethod
    def create(cls, path: str, marks_path: str, capacity: int, fsync: bool) -> RowNumbers:
        """Create the files, with all slots free."""
        made = cls(path, marks_path, capacity, fsync)
        np.frombuffer(made._region, np.int64)[:] = EMPTY
        return made

    def fill(self, rows: Array) -> None:
        """Store rows in the first slots, before the files belong to a table."""
        self.numbers[: len(rows)] = rows
        self._marks.put(np.arange(len(rows)), rows)

    def mark(self, slots: Array, first_row: int) -> None:
        """Store the checksums of rows that are about to be in these slots, numbered from ``first_row``."""
        if len(slots) == 1:
            self._marks.put_one(int(slots[0]), first_row)
        else:
            self._marks.put(slots, np.arange(first_row, first_row + len(slots)))
        self._sync_marks()

    def mark_one(self, slot: int, row: int) -> None:
        """Store the checksum of one row, like ``mark``."""
        self._marks.put_one(slot, row)
        self._sync_marks()

    def mark_moved(self, source: Array, target: Array) -> None:
        """Store the checksums of rows that are about to move to other slots."""
        self._marks.put(target, self.numbers[source])
        self._sync_marks()

    def repaired(self, first_row: int, next_row: int) -> Array:
        """Return the row numbers as they were stored, see ``RowChecksums.repaired``."""
        return self._marks.repaired(self.numbers, first_row, next_row, self._path)

    def restore(self, repaired: Array) -> None:
        """Store repaired row numbers. May be killed at any point and repeated."""
        numbers, live = self.numbers, np.flatnonzero(repaired != EMPTY)
        changed = np.flatnonzero(numbers != repaired)
        numbers[changed] = repaired[changed]
        self._marks.put(live, numbers[live])
        # A row in two slots was copied from one to the other. The first slot is the copy, and stays.
        first = np.unique(numbers[live], return_index=True)[1]
        numbers[np.delete(live, first)] = EMPTY

    def resized(self, capacity: int) -> RowNumbers:
        """Return the row numbers of another capacity in the same files. New slots are free."""
        old = len(self.numbers)
        made = RowNumbers.__new__(RowNumbers)
        made._path, made._marks_path, made._fsync = self._path, self._marks_path, self._fsync
        if capacity > old:
            marks = RowChecksums(map_file(self._marks_path, 8 * capacity), capacity)
            made._map(map_file(self._path, 8 * capacity), marks, capacity)
        else:
            made._map(self._region, self._marks, capacity)
        made.numbers[old:] = EMPTY
        return made

    def flush(self) -> None:
        """Write the row numbers to the disk."""
        self._region.flush()

    def sync(self) -> None:
        """Write all to the disk."""
        self._region.flush()
        self._marks.sync()

    def findings(self) -> List[str]:
        """Return which slots have wrong checksums."""
        return self._marks.findings(self.numbers)

    def _sync_marks(self) -> None:
        if self._fsync:
            # After a power cut an old checksum with a new row number would look like a damaged row number.
            self._marks.sync()

    def _map(self, region: mmap.mmap, marks: RowChecksums, capacity: int) -> None:
        self._region, self._marks = region, marks
        self.numbers: Array = np.frombuffer(region, np.int64)[:capacity]
