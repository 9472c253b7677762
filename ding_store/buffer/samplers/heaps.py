"""Heap samplers: the rows of the lowest or of the highest priority first."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.samplers.base import Sampler, StoredRows, not_enough
from ding_store.buffer.samplers.least_tree import LeastTree
from ding_store.buffer.samplers.masses import Masses, moved
from ding_store.buffer.samplers.priorities import Priorities
from ding_store.buffer.table.rows import RowIndex


class HeapMasses(Masses):
    """
    Overview:
        Priorities in order. The mass of a row is its priority. The oldest row comes first of those with one priority.
    Arguments:
        - sign (:obj:`int`): 1: the lowest priority comes first. -1: the highest.
    """

    def __init__(self, sign: int) -> None:
        super().__init__(alpha=1.0)
        self._sign = sign
        #: The slots by priority, times the sign.
        self.order = LeastTree(1)

    @property
    def limit(self) -> float:
        return float(np.finfo(np.float64).max)

    def begin(self, index: RowIndex) -> None:
        self._index = index
        self.clear()

    def clear(self) -> None:
        self.order = LeastTree(self.index.capacity)

    def refresh(self, slots: Array, largest: float) -> None:
        rows = self.index.row_of_slot[slots]
        self.order.set(slots, np.where(rows == EMPTY, np.inf, self._sign * largest), rows)

    def set(self, slots: Array, priorities: Array) -> None:
        self.order.set(slots, self._sign * priorities, self.index.row_of_slot[slots])

    def priorities_at(self, slots: Array, largest: float) -> Array:
        priorities: Array = np.abs(self.order.keys[slots])
        return priorities

    def resize(self, capacity: int, source: Array, target: Array) -> None:
        if self.order.capacity != capacity:
            order = LeastTree(capacity)
            order.rebuild(moved(self.order.keys, capacity, source, target, np.inf), self.index.row_of_slot)
            self.order = order

    def state(self, slots: Array) -> Dict[str, Array]:
        return {'mass': self.priorities_at(slots, 1.0), 'alpha': np.array(self.alpha)}

    def load_state(self, slots: Array, state: Mapping[str, Array]) -> None:
        keys = np.full(self.order.capacity, np.inf)
        keys[slots] = self._sign * state['mass']
        self.order.rebuild(keys, self.index.row_of_slot)


class HeapSampler(Sampler):
    """
    Overview:
        The base of MinHeap and MaxHeap. Samples take nothing out: a row comes again until it leaves, or until its
        priority changes.
    """

    #: 1: the lowest priority comes first. -1: the highest.
    sign: int

    def __init__(self) -> None:
        self._masses = HeapMasses(self.sign)
        self._priorities = Priorities(self._masses)
        #: The record of priorities holds a step, which a heap has no use for.
        self.step = 0

    @property
    def priorities(self) -> Priorities:
        return self._priorities

    def attach(self, index: RowIndex, rows: Optional[StoredRows] = None) -> None:
        self._priorities.attach(index)

    def persist_to(self, files: TableDirectory) -> None:
        """Restore the recorded priorities, and record each from now on. Rows without one count as new."""
        self._priorities.persist(files.values('priority'), self)

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        """
        Raises:
            - NotEnoughData: There are fewer than ``size`` rows.
            - TypeError: ``replace`` is given.
        """
        if replace:
            raise TypeError(f'a {type(self).__name__} samples rows in order. Leave out replace ({replace}).')
        if self._priorities.index is not index:
            self._priorities.attach(index)
        self._priorities.flush()
        if sample_range is None:
            if index.count < size:
                raise not_enough(size, index.count)
            return self._masses.order.least(size)
        slots = index.slots_by_age()[sample_range].astype(np.intp)
        if len(slots) < size:
            raise not_enough(size, len(slots))
        chosen: Array = slots[np.lexsort((index.row_of_slot[slots], self._masses.order.keys[slots]))[:size]]
        return chosen

    def state(self) -> Dict[str, Array]:
        return {**self._priorities.state(), 'step': np.array(self.step)}

    def load_state(self, state: Mapping[str, Array]) -> None:
        """
        Raises:
            - PriorityError: It is the state of another sampler or of other rows. Nothing changed.
        """
        with self._masses.index.lock:
            self._priorities.check_state(state)
            self._priorities.load_state(state)

    def __deepcopy__(self, memo: Dict[int, Any]) -> HeapSampler:
        """Return a sampler without a table. ``take_over`` copies the priorities."""
        twin = memo[id(self)] = type(self)()
        return twin


class MinHeap(HeapSampler):
    """
    Overview:
        Samples the rows of the lowest priorities, lowest first, like Reverb's selector of this name. Of rows with one
        priority the oldest comes first. A sampled row stays, and comes again in the next batch, unless its priority
        changes. ``limited(MinHeap(), max_times_sampled=1)`` removes it. O(B log(capacity)).

        Priorities come with a push or by ``update_priorities``. New rows without one get the largest priority seen, at
        first 1.
    """

    sign = 1


class MaxHeap(HeapSampler):
    """
    Overview:
        Samples the rows of the highest priorities, highest first. All else works as in MinHeap.
    """

    sign = -1
