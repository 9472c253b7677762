"""The priorities of a table's rows: updates by row number, the masses that follow, and a record in files."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Protocol, Tuple

import numpy as np
import torch

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.persistence.slot_values import SlotValues
from ding_store.buffer.samplers.base import Record
from ding_store.buffer.samplers.masses import Masses
from ding_store.buffer.samplers.slot_set import PendingSlots
from ding_store.buffer.table.row_choices import as_rows
from ding_store.buffer.table.rows import NO_ROWS, RowIndex, RowListener
from ding_store.errors import ConfigError, PriorityError


class HasStep(Protocol):
    """An object whose step is recorded with the priorities: WeightedDraws."""

    step: int


class Priorities(RowListener):
    """
    Overview:
        The priorities of the rows of one table. New rows get the largest priority seen, at first 1, unless the push
        gives one (Ape-X, Horgan et al. 2018). Updates of rows that are gone are skipped and counted.
    Arguments:
        - masses (:obj:`Masses`): Computes the rows' masses from their priorities.
    """

    def __init__(self, masses: Masses) -> None:
        self.masses = masses
        #: The largest priority seen. New rows get it.
        self.max_priority = 1.0
        #: The number of updates for rows that are gone.
        self.num_stale_updates = 0
        #: The index of the table. None before ``attach``.
        self.index: Optional[RowIndex] = None
        self._pending = PendingSlots(self._refresh)
        #: Computes the masses of all rows that came or left. The caller holds the index's lock.
        self.flush = self._pending.flush
        #: Records the priorities, for a table with a path.
        self._persisted: Optional[PersistedPriorities] = None
        #: Other masses that follow the same priorities.
        self._followers: List[Masses] = []

    @property
    def is_compiled(self) -> bool:
        """True if numba runs the tree."""
        return self.masses.tree.is_compiled

    def attach(self, index: RowIndex) -> None:
        """
        Overview:
            Follow the rows of this table. Rows that it already holds count as new.
        Raises:
            - ConfigError: They belong to another table.
        """
        if index is self.index:
            return
        if self.index is not None:
            raise ConfigError('a sampler holds the priorities of one table. Create another sampler for another table.')
        with index.lock:
            try:
                self.index = index
                self.masses.begin(index)
                index.listen(self)
                self._pending.add(index.live_slots)
            except BaseException:
                self.index = None  # The next call attaches it.
                raise

    def persist(self, values: SlotValues, draws: HasStep) -> None:
        """Restore the recorded priorities and step, and record each from now on. Rows without one count as new."""
        self._persisted = None
        self._persisted = PersistedPriorities(self, draws, self.masses.index, values)

    def follow(self, masses: Masses) -> None:
        """Compute other masses from the same priorities as well, from now on."""
        index = self.masses.index
        with index.lock:
            self.flush()
            masses.begin(index)
            slots = index.live_slots.astype(np.int64)
            masses.set(slots, self.masses.priorities_at(slots, self.max_priority))
            self._followers.append(masses)

    def changed(self, slots: Array) -> None:
        """Compute the masses of these slots at the next draw."""
        self._pending.add(slots)

    def only_changed(self, slots: Array) -> None:
        """Compute the masses of these slots at the next draw, and of no others that came or left before."""
        self._pending.clear()
        self._pending.add(slots)

    # What a buffer calls: see ``RowPriorities``.

    def check(self, priority: Any, num_rows: int) -> Array:
        """
        Overview:
            Return the priorities as float64 ``(num_rows,)``.
        Raises:
            - PriorityError: See ``update``.
        """
        values, limit = _as_floats(priority, num_rows), self.masses.limit
        # Any comparison with NaN is False, and the minimum of numbers with a NaN is NaN.
        if num_rows and not (np.minimum.reduce(values) >= 0 and np.maximum.reduce(values) <= limit):
            bad = values[~((values >= 0) & (values <= limit))][0]
            raise PriorityError(f'priorities must be numbers >= 0 and at most {limit:g}, got {bad}')
        return values

    def update(self, rows: Array, priority: Any) -> None:
        """
        Overview:
            Set new priorities. If a row is repeated, its last one counts. Rows that are gone are skipped and counted.
        Arguments:
            - rows (:obj:`np.ndarray`): Row numbers ``(B,)``.
            - priority: ``(B,)``, numbers >= 0.
        Raises:
            - PriorityError: A priority is NaN, negative, infinite or not a number, or their number differs from the
              rows'. Nothing changed.
        """
        self.num_stale_updates += self._put(as_rows(rows), priority)

    def insert(self, rows: Array, priority: Any) -> None:
        """Set the priorities of rows just pushed. Unlike ``update``, do not count rows that left at once."""
        self._put(as_rows(rows), priority)

    def recording(self, priority: Array) -> Optional[Record]:
        return None if self._persisted is None else self._persisted.recording(priority)

    def of(self, rows: Array) -> Array:
        """Return the priorities of rows ``(B,)``, computed from the masses. NaN for rows that are gone."""
        index = self.masses.index
        with index.lock:
            self.flush()
            slots, found = index.find(as_rows(rows))
            return np.where(found, self.masses.priorities_at(slots, self.max_priority), np.nan)

    # State.

    def state(self) -> Dict[str, Array]:
        """Return all state as arrays. Arrays with one value per row are ordered by age."""
        index = self.masses.index
        with index.lock:
            self.flush()
            state = self.masses.state(index.slots_by_age())
        return {
            **state,
            'max_priority': np.array(self.max_priority),
            'num_stale_updates': np.array(self.num_stale_updates),
        }

    def check_state(self, state: Mapping[str, Array]) -> None:
        """
        Raises:
            - PriorityError: This is no ``state`` of draws by such priorities, of a table with the same rows.
        """
        missing = {'mass', 'alpha', 'max_priority', 'step', 'num_stale_updates'} - set(state)
        if missing:
            raise PriorityError(f'the saved priorities lack {sorted(missing)}')
        num_rows = self.masses.index.count
        if state['mass'].shape != (num_rows,):
            raise PriorityError(
                f'the saved priorities have shape {state["mass"].shape}, but the table has {num_rows} rows'
            )
        self.masses.check_state(state)

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Restore a ``state`` that ``check_state`` accepts. The caller holds the index's lock."""
        self._pending.clear()
        slots = self.masses.index.slots_by_age().astype(np.int64)
        self.masses.load_state(slots, state)
        for each in self._followers:
            each.clear()
            each.set(slots, self.masses.priorities_at(slots, float(state['max_priority'])))
        self.max_priority = float(state['max_priority'])
        self.num_stale_updates = int(state['num_stale_updates'])
        if self._persisted is not None:
            self._persisted.record_all()

    # Changes of the table, with its index locked.

    def published(self, slots: Array) -> None:
        self._pending.add(slots)

    def removed(self, slots: Array) -> None:
        self._pending.add(slots)

    def restored(self, slots: Array) -> None:
        self._pending.take_back(slots)

    def cleared(self) -> None:
        """Start anew: all rows left, and the next ones may be of another kind."""
        self._pending.clear()
        self.max_priority = 1.0
        for each in (self.masses, *self._followers):
            each.clear()

    def settled(self, slots: Array) -> None:
        self._pending.add(slots)

    def resizing(self) -> None:
        self.flush()

    def resized(self, capacity: int, source: Array, target: Array) -> None:
        for each in (self.masses, *self._followers):
            each.resize(capacity, source, target)

    def _refresh(self, slots: Array) -> None:
        for each in (self.masses, *self._followers):
            each.refresh(slots, self.max_priority)

    def _set(self, slots: Array, values: Array) -> None:
        for each in (self.masses, *self._followers):
            each.set(slots, values)

    def _put(self, rows: Array, priority: Any) -> int:
        """Set priorities. Return how many of the rows are gone."""
        masses = self.masses
        index, kernels = masses.index, masses.tree.kernels
        values = _as_floats(priority, len(rows))
        with index.lock:
            self.flush()
            if kernels is not None:
                rows, slots = np.array(rows, order='C'), np.empty(len(rows), np.int64)
                largest = kernels.locate(np.asarray(index.row_of_slot), rows, values, masses.limit, slots)
                if largest >= 0:
                    self.max_priority = max(self.max_priority, largest)
                    self._set(slots, values)
                    if self._persisted is not None:
                        self._persisted.record(slots, rows, values)
                    return 0
            return self._put_some(index, rows, self.check(values, len(rows)))

    def _put_some(self, index: RowIndex, rows: Array, values: Array) -> int:
        """Set priorities if some rows are deleted or relocated, or without numba. Return how many rows are gone."""
        slots, found = index.find(rows)
        num_found = int(np.count_nonzero(found))
        if num_found < len(rows):
            slots, values = slots[found], values[found]
        if num_found:
            self.max_priority = max(self.max_priority, float(np.maximum.reduce(values)))
            self._set(slots, values)
            if self._persisted is not None:
                self._persisted.record(slots, rows[found], values)
        return len(rows) - num_found


class PersistedPriorities(RowListener):
    """
    Overview:
        Stores priorities on disk whenever they are set, including those of new rows. At the start it loads the
        priorities of the previous process. Rows without a stored priority count as new, with the largest priority.
    Arguments:
        - priorities (:obj:`Priorities`): Attached to the table. They call ``record`` from now on.
        - draws (:obj:`HasStep`): Its step is stored as well.
        - index (:obj:`RowIndex`): The index of the table.
        - values (:obj:`SlotValues`): The file of priorities.
    """

    def __init__(self, priorities: Priorities, draws: HasStep, index: RowIndex, values: SlotValues) -> None:
        self._priorities, self._draws, self._index, self._values = priorities, draws, index, values
        slots, rows = self._live()
        stored, known = values.get(slots, rows)
        # New rows get the largest priority ever seen, whose row may have left since.
        largest = max(float(stored[known].max(initial=0.0)), values.largest)
        if known.any():
            priorities.insert(rows, np.where(known, stored, largest))
        priorities.max_priority = max(priorities.max_priority, largest)
        draws.step = values.step
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
        self._values.step = self._draws.step
        self._values.largest = self._priorities.max_priority

    def record_all(self) -> None:
        """Store the priorities of all rows."""
        slots, rows = self._live()
        self.record(slots, rows, self._priorities.of(rows))

    def published(self, slots: Array) -> None:
        rows, given = self._index.row_of_slot[slots], self._given
        self._given = NO_ROWS
        if not np.array_equal(rows, given):
            self._begin(slots, rows)

    def settled(self, slots: Array) -> None:
        rows = self._index.row_of_slot[slots]
        self._begin(slots[rows != EMPTY], rows[rows != EMPTY])

    def cleared(self) -> None:
        """Store the largest priority, after the priorities began anew: the next process starts with it."""
        self._values.largest = self._priorities.max_priority

    def _live(self) -> Tuple[Array, Array]:
        """Return slots and row numbers of all rows, oldest first."""
        with self._index.lock:
            slots = self._index.slots_by_age().astype(np.intp)
            return slots, self._index.row_of_slot[slots]

    def _begin(self, slots: Array, rows: Array) -> None:
        """Store or drop the values of new rows. A killed push may have left values under the same row numbers."""
        if self._priorities.masses.has_new_rows:
            self._values.set(slots, rows, self._priorities.max_priority)
        else:
            self._values.drop(slots)


def _as_floats(priority: Any, num_rows: int) -> Array:
    if type(priority) is np.ndarray and priority.dtype == np.float64 and priority.shape == (num_rows,):
        return priority.copy()  # The compiled functions accept no array that is read-only or has gaps.
    try:
        values = np.array(on_cpu(priority), np.float64, order='C', ndmin=1)
    except (TypeError, ValueError, RuntimeError) as e:  # RuntimeError: tensors of different shapes or devices.
        raise PriorityError(f'priority must be numbers of shape ({num_rows},), got {priority!r}') from e
    if values.shape != (num_rows,):
        raise PriorityError(f'priority must have shape ({num_rows},), one per row, got {np.shape(priority)}')
    return values


def on_cpu(numbers: Any) -> Any:
    """Copy a tensor, or a list of tensors, from any device to one array. Return anything else unchanged."""
    if isinstance(numbers, (list, tuple)) and numbers and all(isinstance(each, torch.Tensor) for each in numbers):
        numbers = torch.stack([each.detach() for each in numbers])
    return numbers.detach().to('cpu', torch.float64).numpy() if isinstance(numbers, torch.Tensor) else numbers
