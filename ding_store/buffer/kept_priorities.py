"""Priorities that outlive their process, for a table with a path."""

from __future__ import annotations

import copy
from typing import Any, Dict, Mapping

import numpy as np

from ding_store.buffer.arrays import Array
from ding_store.buffer.choices import as_rows
from ding_store.buffer.rows import RowIndex
from ding_store.buffer.samplers import PrioritySampler
from ding_store.buffer.slot_values import SlotValues


class KeptPriorities:
    """
    Overview:
        A sampler's priorities, each put on record when it is set. Those of a former process are the sampler's from the
        beginning; rows that had none yet count as new, with the largest priority there is.
    Arguments:
        - sampler (:obj:`PrioritySampler`): Attached to the table.
        - index (:obj:`RowIndex`): The table's.
        - values (:obj:`SlotValues`): Where they are put on record.
    """

    def __init__(self, sampler: PrioritySampler, index: RowIndex, values: SlotValues) -> None:
        self._sampler, self._index, self._values = sampler, index, values
        with index.lock:
            slots = index.slots_by_age().astype(np.intp)
            rows = index.row_of_slot[slots]
        priorities, known = values.get(slots, rows)
        # A file that was damaged must not keep anybody from sampling.
        known &= np.isfinite(priorities) & (priorities >= 0)
        if known.any():
            sampler.insert(rows, np.where(known, priorities, priorities[known].max()))
        if hasattr(sampler, 'step'):
            sampler.step = values.step

    def update(self, rows: Array, priority: Any) -> None:
        self._sampler.update(rows, priority)
        self._record(rows, priority)

    def insert(self, rows: Array, priority: Any) -> None:
        self._sampler.insert(rows, priority)
        self._record(rows, priority)

    def check(self, priority: Any, num_rows: int) -> Array:
        return self._sampler.check(priority, num_rows)

    def state(self) -> Dict[str, Array]:
        return self._sampler.state()

    def load_state(self, state: Mapping[str, Array]) -> None:
        self._sampler.load_state(state)

    def __deepcopy__(self, memo: Dict[int, Any]) -> PrioritySampler:
        """The sampler's copy: a copy of a buffer is private."""
        return copy.deepcopy(self._sampler, memo)

    def _record(self, rows: Array, priority: Any) -> None:
        rows, values = as_rows(rows), np.asarray(priority, np.float64)
        with self._index.lock:
            slots, found = self._index.find(rows)
            self._values.set(slots[found], rows[found], values[found])
            self._values.step = getattr(self._sampler, 'step', 0)
