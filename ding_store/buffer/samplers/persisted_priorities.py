"""Priorities that survive the process, for a table with a path."""

from __future__ import annotations

import copy
from typing import Any, Dict, Mapping, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.persistence.slot_values import SlotValues
from ding_store.buffer.samplers.base import PrioritySampler
from ding_store.buffer.table.row_choices import as_rows
from ding_store.buffer.table.rows import NO_ROWS, RowIndex, RowListener
from ding_store.buffer.table.table import Keep


class PersistedPriorities(RowListener):
    """
    Overview:
        Stores a sampler's priorities on disk whenever they are set, including those of new rows. At the start it loads
        the priorities of the previous process into the sampler. Rows without a stored priority count as new, with the
        largest priority.
    Arguments:
        - sampler (:obj:`PrioritySampler`): Attached to the table.
        - index (:obj:`RowIndex`): The index of the table.
        - values (:obj:`SlotValues`): The file of priorities.
    """

    def __init__(self, sampler: PrioritySampler, index: RowIndex, values: SlotValues) -> None:
        self._sampler, self._index, self._values = sampler, index, values
        #: The sampler inside a wrapper with limits: the wrapper has no priorities or counts itself.
        self._inner: Any = getattr(sampler, 'sampler', sampler)
        slots, rows = self._live()
        priorities, known = values.get(slots, rows)
        # New rows get the largest priority ever seen, whose row may have left since.
        largest = max(float(priorities[known].max(initial=0.0)), values.largest)
        if known.any():
            sampler.insert(rows, np.where(known, priorities, largest))
        if hasattr(self._inner, 'max_priority'):
            self._inner.max_priority = max(self._inner.max_priority, largest)
        if hasattr(self._inner, 'step'):
            self._inner.step = values.step
        #: New rows that were pushed with priorities.
        self._given = NO_ROWS
        self._begin(slots[~known], rows[~known])
        index.listen(self)

    def update(self, rows: Array, priority: Any) -> None:
        values = self.check(priority, len(as_rows(rows)))
        self._sampler.update(rows, values)
        self._record(rows, values)

    def insert(self, rows: Array, priority: Any) -> None:
        values = self.check(priority, len(as_rows(rows)))
        self._sampler.insert(rows, values)
        self._record(rows, values)

    def keeping(self, priority: Array) -> Keep:
        """
        Return the ``keep`` function of a push with priorities ``(n,)``. It stores them, or the last of them, before
        their rows are live.
        """

        def keep(slots: Array, rows: Array) -> None:
            self._values.set(slots, rows, priority[len(priority) - len(rows) :])
            self._given = rows

        return keep

    def check(self, priority: Any, num_rows: int) -> Array:
        return self._sampler.check(priority, num_rows)

    def state(self) -> Dict[str, Array]:
        return self._sampler.state()

    def load_state(self, state: Mapping[str, Array]) -> None:
        self._sampler.load_state(state)
        if hasattr(self._inner, 'priorities_of'):
            rows = self._live()[1]
            self._record(rows, self._inner.priorities_of(rows))

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
        self._values.largest = getattr(self._inner, 'max_priority', 0.0)

    def __deepcopy__(self, memo: Dict[int, Any]) -> PrioritySampler:
        """Return a copy of the sampler alone: a copy of a buffer is private."""
        return copy.deepcopy(self._sampler, memo)

    def _live(self) -> Tuple[Array, Array]:
        """Return slots and row numbers of all rows, oldest first."""
        with self._index.lock:
            slots = self._index.slots_by_age().astype(np.intp)
            return slots, self._index.row_of_slot[slots]

    def _begin(self, slots: Array, rows: Array) -> None:
        """Store or drop the values of new rows. A killed push may have left values under the same row numbers."""
        if getattr(self._inner, 'has_new_rows', False):
            self._values.set(slots, rows, self._inner.max_priority)
        else:
            self._values.drop(slots)

    def _record(self, rows: Array, values: Array) -> None:
        rows = as_rows(rows)
        with self._index.lock:
            slots, found = self._index.find(rows)
            self._values.set(slots[found], rows[found], values[found])
            self._values.step = getattr(self._inner, 'step', 0)
            self._values.largest = getattr(self._inner, 'max_priority', 0.0)
