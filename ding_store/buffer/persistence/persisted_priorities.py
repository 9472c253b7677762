"""Priorities that outlive their process, for a table with a path."""

from __future__ import annotations

import copy
from typing import Any, Dict, Mapping, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.persistence.slot_values import SlotValues
from ding_store.buffer.sampling.samplers import PrioritySampler
from ding_store.buffer.table.row_choices import as_rows
from ding_store.buffer.table.rows import NO_ROWS, RowIndex, RowListener
from ding_store.buffer.table.table import Keep


class PersistedPriorities(RowListener):
    """
    Overview:
        A sampler's priorities, each put on record when it is set, also those that new rows begin with. Those of a
        former process are the sampler's from the beginning; rows that have none count as new, with the largest priority
        there is.
    Arguments:
        - sampler (:obj:`PrioritySampler`): Attached to the table.
        - index (:obj:`RowIndex`): The table's.
        - values (:obj:`SlotValues`): Where they are put on record.
    """

    def __init__(self, sampler: PrioritySampler, index: RowIndex, values: SlotValues) -> None:
        self._sampler, self._index, self._values = sampler, index, values
        #: Limits have none of what is counted.
        self._inner: Any = getattr(sampler, 'sampler', sampler)
        slots, rows = self._live()
        priorities, known = values.get(slots, rows)
        # That of new rows is the largest ever seen, which may have left since.
        largest = max(float(priorities[known].max(initial=0.0)), values.largest)
        if known.any():
            sampler.insert(rows, np.where(known, priorities, largest))
        if hasattr(self._inner, 'max_priority'):
            self._inner.max_priority = max(self._inner.max_priority, largest)
        if hasattr(self._inner, 'step'):
            self._inner.step = values.step
        #: Rows whose priorities came with them.
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
        """What puts priorities ``(n,)`` of new rows, or of the last of them, on record before they are live."""

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
        """The sampler, which was told before, begins anew: so does the next process."""
        self._values.largest = getattr(self._inner, 'max_priority', 0.0)

    def __deepcopy__(self, memo: Dict[int, Any]) -> PrioritySampler:
        """The sampler's copy: a copy of a buffer is private."""
        return copy.deepcopy(self._sampler, memo)

    def _live(self) -> Tuple[Array, Array]:
        """Slots and row numbers of all rows, oldest first."""
        with self._index.lock:
            slots = self._index.slots_by_age().astype(np.intp)
            return slots, self._index.row_of_slot[slots]

    def _begin(self, slots: Array, rows: Array) -> None:
        """New rows, whose numbers a push may have had that was killed before it was committed."""
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
