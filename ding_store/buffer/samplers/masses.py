"""The masses of rows, in proportion to which a sampler draws them. They follow from the rows' priorities."""

from __future__ import annotations

from typing import Dict, Mapping, Optional

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.samplers.base import is_within
from ding_store.buffer.samplers.sum_tree import SumTree
from ding_store.buffer.table.rows import RowIndex
from ding_store.errors import ConfigError, PriorityError

#: Sums of masses below this stay finite.
_MAX_TOTAL = 1e300


class Masses:
    """
    Overview:
        One mass per slot, ``(priority + epsilon) ** alpha`` of its row, in a sum tree. Callers hold the index's lock.
    Arguments:
        - alpha (:obj:`float`): The influence of priorities. 0 is uniform.
        - epsilon (:obj:`float`): Added to every priority, so that none is zero.
    Raises:
        - ConfigError: An argument is out of range.
    """

    #: True if a row has its priority from its push on.
    has_new_rows = True

    def __init__(self, alpha: float, epsilon: float = 0.0) -> None:
        if not is_within(alpha, 0, 1):
            raise ConfigError(f'alpha ({alpha!r}) must be in [0, 1]')
        if not is_within(epsilon, 0) or epsilon >= 1:
            raise ConfigError(f'epsilon ({epsilon!r}) must be in [0, 1)')
        self.alpha, self.epsilon = float(alpha), float(epsilon)
        self.tree = SumTree(1)
        self._index: Optional[RowIndex] = None

    @property
    def index(self) -> RowIndex:
        """The index of the rows."""
        if self._index is None:
            raise PriorityError('the sampler has no table yet. Pass it to a StoreBuffer first.')
        return self._index

    @property
    def limit(self) -> float:
        """The largest priority for which the sum of all masses stays finite."""
        return _MAX_TOTAL / self.tree.capacity

    def begin(self, index: RowIndex) -> None:
        """Start with the slots of this index, none of which has a mass."""
        self._index = index
        self.tree = SumTree(index.capacity)

    def clear(self) -> None:
        """Start anew: all rows left."""
        self.tree.clear()

    def refresh(self, slots: Array, largest: float) -> None:
        """Set the masses of slots whose rows are new or gone. New rows get the priority ``largest``."""
        is_live = self.index.row_of_slot[slots] != EMPTY
        self.tree.set(slots, np.where(is_live, self.of(np.array([largest])), 0.0))

    def set(self, slots: Array, priorities: Array) -> None:
        """Set the priorities of live rows. If a slot is repeated, its last priority counts."""
        self.tree.set_powers(slots, priorities, self.epsilon, self.alpha)

    def priorities_at(self, slots: Array, largest: float) -> Array:
        """Return the priorities of live rows. New ones have the priority ``largest``."""
        if not self.alpha:
            return np.full(len(slots), largest)
        return np.maximum(self.tree.masses[slots] ** (1 / self.alpha) - self.epsilon, 0.0)

    def of(self, priorities: Array) -> Array:
        """Return the masses that belong to priorities."""
        return self.tree.powers(priorities, self.epsilon, self.alpha)

    def resize(self, capacity: int, source: Array, target: Array) -> None:
        """Move the masses to another number of slots. Rows moved from ``source`` to ``target`` slots."""
        if self.tree.capacity != capacity:
            masses, tree = (
                moved(self.tree.masses[: self.tree.capacity], capacity, source, target, 0.0),
                SumTree(capacity),
            )
            tree.rebuild(masses)
            self.tree = tree

    def state(self, slots: Array) -> Dict[str, Array]:
        """Return all state of these rows, as arrays in the order of their slots."""
        return {'mass': self.tree.masses[slots], 'alpha': np.array(self.alpha)}

    def check_state(self, state: Mapping[str, Array]) -> None:
        """
        Raises:
            - PriorityError: The state belongs to other masses.
        """
        if float(state['alpha']) != self.alpha:
            raise PriorityError(f'the saved priorities were made with alpha={state["alpha"]}, not {self.alpha}')

    def load_state(self, slots: Array, state: Mapping[str, Array]) -> None:
        """Restore a ``state`` of rows in these slots. There are no others."""
        masses = np.zeros(self.tree.capacity)
        masses[slots] = state['mass']
        self.tree.rebuild(masses)


def moved(values: Array, capacity: int, source: Array, target: Array, nothing: float) -> Array:
    """Return values by slot for another capacity. Values of ``source`` slots move to ``target`` slots."""
    kept = min(capacity, len(values))
    result = np.full(capacity, nothing)
    result[:kept] = values[:kept]
    result[target] = values[source]
    result[source[source < capacity]] = nothing
    return result
