"""Priorities of a table's rows in DI-engine's segment trees, by slot."""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

import numpy as np
from ding.utils import MinSegmentTree, SumSegmentTree

from ding_store.buffer.arrays import Array
from ding_store.buffer.rows import RowIndex
from ding_store.errors import ConfigError

#: Added to every updated priority, as PriorityExperienceReplay does, so that none is zero.
EPSILON = 1e-5


class Priorities:
    """
    Overview:
        What DI-engine's PriorityExperienceReplay does (Schaul et al. 2015, proportional), with trees that are indexed
        by slot instead of by a counter of their own: a row that takes over the slot of another takes over its place in
        the trees, so that rows may leave in any order.
    Arguments:
        - index (:obj:`RowIndex`): The table's.
        - alpha (:obj:`float`): Priorities count to the power of this.
        - beta (:obj:`float`): Importance weights, to begin with; grows to 1 in ``anneal_iter`` draws.
    """

    def __init__(self, index: RowIndex, alpha: float, beta: float, anneal_iter: float, max_priority: float) -> None:
        for name, value in (('alpha', alpha), ('beta', beta)):
            if not 0 <= value <= 1:
                raise ConfigError(f'{name} ({value!r}) must be in [0, 1]')
        self._index, self._alpha, self._beta, self._limit = index, alpha, beta, max_priority
        self._anneal_step = (1 - beta) / anneal_iter if anneal_iter else 0.0
        size = 1 << max(1, (index.capacity - 1).bit_length())
        self._sums, self._minima = SumSegmentTree(size), MinSegmentTree(size)
        #: The largest so far: what rows get whose priority is not known.
        self.max_priority = 1.0

    def add(self, rows: Array, priorities: Optional[Sequence[Optional[float]]] = None) -> None:
        """New rows, with their own priorities where there are any."""
        values = [self.max_priority if p is None else float(p) for p in priorities or [None] * len(rows)]
        # Without mass a row would never be drawn, and a table of such rows could not be drawn from.
        self._set(rows, np.maximum(checked(values), EPSILON))

    def update(self, rows: Array, priorities: Sequence[float]) -> None:
        """
        Overview:
            New priorities, at most ``max_priority`` of the configuration; rows that are gone are passed over.
        Raises:
            - TypeError: A priority is negative or NaN; nothing was set.
        """
        values = np.minimum(checked(priorities), self._limit) + EPSILON
        self._set(rows, values)
        self.max_priority = max(self.max_priority, float(values.max(initial=0)))

    def drop(self, slots: Array) -> None:
        """Slots of rows that were deleted: they have no mass any more."""
        for slot in slots.tolist():
            self._sums[slot] = self._sums.neutral_element
            self._minima[slot] = self._minima.neutral_element

    def draw(self, size: int) -> Tuple[Array, Array]:
        """
        Overview:
            Row numbers ``(size,)`` in proportion to their priorities, one from each of ``size`` equal shares of the
            mass, and their importance weights ``(size,)``, relative to the largest there is.
        """
        shares_of = (np.arange(size) + np.random.uniform(size=size)) / size
        slots = self._find(shares_of)
        # Sums of floats are not exact: a mass next to a slot's border may be found in an empty neighbour.
        while (empty := self._index.row_of_slot[slots] < 0).any():
            slots[empty] = self._find(np.random.uniform(size=int(empty.sum())))
        shares = np.array([self._sums[slot] for slot in slots.tolist()])
        # (N p_i)^-beta over its largest value, (N p_min)^-beta: N cancels (Schaul et al. 2015, section 3.4).
        weights = (shares / self._minima.reduce()) ** -self._beta
        self._beta = min(1.0, self._beta + self._anneal_step)
        return self._index.row_of_slot[slots], weights.astype(np.float32)

    def of(self, rows: Array) -> Array:
        """The priorities of live rows, as they were given."""
        slots, _ = self._index.find(rows)
        return np.array([self._sums[slot] for slot in slots.tolist()]) ** (1 / self._alpha if self._alpha else 0.0)

    def _find(self, shares: Array) -> Array:
        total = self._sums.reduce()
        return np.array([int(self._sums.find_prefixsum_idx(share * total)) for share in shares], np.intp)

    def _set(self, rows: Array, priorities: Array) -> None:
        with self._index.lock:
            slots, found = self._index.find(rows)
        for slot, mass in zip(slots[found].tolist(), (priorities[found] ** self._alpha).tolist()):
            self._sums[slot] = mass
            self._minima[slot] = mass


def checked(priorities: Sequence[float]) -> Array:
    """Priorities as an array; a negative one or NaN is a TypeError that names it."""
    values = np.array([float(priority) for priority in priorities], np.float64)
    if not (values >= 0).all():
        raise TypeError(f'priorities must be numbers >= 0, got {values[~(values >= 0)][0]}')
    return values
