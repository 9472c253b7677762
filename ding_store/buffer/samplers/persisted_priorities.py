"""Priorities that survive the process, for a table with a path."""

from __future__ import annotations

from typing import Protocol, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.persistence.slot_values import SlotValues
from ding_store.buffer.samplers.base import Record
from ding_store.buffer.table.rows import NO_ROWS, RowIndex, RowListener


class HasPriorities(Protocol):
    """A sampler whose priorities are recorded: Prioritized, or one derived from it."""

    max_priority: float
    step: int
    has_new_rows: bool

    def insert(self, rows: Array, priority: Array) -> None:
        """Set the priorities of rows."""

    def priorities_of(self, rows: Array) -> Array:
        """Return the priorities of rows."""


class PersistedPriorities(RowListener):
    """
    Overview:
        Stores a sampler's priorities on disk whenever they are set, including those of new rows. At the start it loads
        the priorities of the previous process into the sampler. Rows without a stored priority count as new, with the
        largest priority.
    Arguments:
        - sampler (:obj:`HasPriorities`): Attached to the table. It calls ``record`` from now on.
        - index (:obj:`RowIndex`): The index of the table.
        - values (:obj:`SlotValues`): The file of priorities.
    """

    def __init__(self, sampler: HasPriorities, index: RowIndex, values: SlotValues) -> None:
        self._sampler, self._index, self._values = sampler, index, values
        slots, rows = self._live()
        priorities, known = values.get(slots, rows)
        # New rows get the largest priority ever seen, whose row may have left since.
        largest = max(float(priorities[known].max(initial=0.0)), values.largest)
        if known.any():
            sampler.insert(rows, np.where(known, priorities, largest))
        sampler.max_priority = max(sampler.max_priority, largest)
        sampler.step = values.step
        #: New rows that were pushed with priorities.
        self._given = NO_ROWS
        self._begin(slots[~known], rows[~known])
        index.listen(self)

    def recording(self, priority: Array) -> Record:
        """
        Return the function for a push with priorities ``(n,)``. It stores them, or the last of them, before their rows
        are live.
        """

        def record(slots: Array, rows: Array) -> None:
            self._values.set(slots, rows, priority[len(priority) - len(rows) :])
            self._given = rows

        return record

    def record(self, slots: Array, rows: Array, values: Array) -> None:
        """Store the priorities of live rows in these slots. The caller holds the index's lock."""
        self._values.set(slots, rows, values)
        self._values.step = self._sampler.step
        self._values.largest = self._sampler.max_priority

    def record_all(self) -> None:
        """Store the priorities of all rows."""
        slots, rows = self._live()
        self.record(slots, rows, self._sampler.priorities_of(rows))

    def published(self, slots: Array) -> None:
        rows, given = self._index.row_of_slot[slots], self._given
        self._given = NO_ROWS
        if not np.array_equal(rows, given):
            self._begin(slots, rows)

    def settled(self, slots: Array) -> None:
        rows = self._index.row_of_slot[slots]
        self._begin(slots[rows != EMPTY], rows[rows != EMPTY])

    def cleared(self) -> None:
        """Store the largest priority, after the sampler was reset: the next process starts with it."""
        self._values.largest = self._sampler.max_priority

    def _live(self) -> Tuple[Array, Array]:
        """Return slots and row numbers of all rows, oldest first."""
        with self._index.lock:
            slots = self._index.slots_by_age().astype(np.intp)
            return slots, self._index.row_of_slot[slots]

    def _begin(self, slots: Array, rows: Array) -> None:
        """Store or drop the values of new rows. A killed push may have left values under the same row numbers."""
        if self._sampler.has_new_rows:
            self._values.set(slots, rows, self._sampler.max_priority)
        else:
            self._values.drop(slots)
