"""A stack sampler: the newest rows first, each row once."""

from __future__ import annotations

from collections import deque
from typing import Any, Deque, Dict, List, Mapping, Optional

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.persistence.slot_values import SlotValues
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.samplers.base import StoredRows, not_enough
from ding_store.buffer.samplers.in_order import InOrder
from ding_store.buffer.samplers.masses import moved
from ding_store.buffer.table.rows import NO_ROWS, RowIndex, RowListener
from ding_store.errors import ConfigError

#: The number of rows that one look-up covers. It skips rows that left.
_CHUNK = 1024


class Stack(RowListener):
    """
    Overview:
        The rows of a table that were not sampled yet. Callers hold the index's lock.

        * ``_is_taken``: which slots hold a row that was sampled or is drawn ahead.
        * ``_waiting``: the numbers of the first ``_count`` rows that wait, oldest first. Rows that left, and some that
          were taken, may still be in it. It is made anew from ``_is_taken`` after all but pushes and samples.
    """

    def __init__(self, index: RowIndex) -> None:
        self.index = index
        self._is_taken = np.zeros(index.capacity, bool)
        self._waiting, self._count = NO_ROWS, 0
        self._is_outdated = True
        self._ahead: Deque[Array] = deque()
        self._values: Optional[SlotValues] = None
        index.listen(self)

    def persist_to(self, values: SlotValues) -> None:
        """Restore which rows were sampled, and record each sample from now on."""
        self._values = values
        slots = self.index.slots_by_age().astype(np.intp)
        self._is_taken[slots] = values.get(slots, self.index.row_of_slot[slots])[1]
        self._is_outdated = True

    def newest(self, size: int) -> Array:
        """
        Overview:
            Return the slots of the newest rows that wait, newest first.
        Raises:
            - NotEnoughData: Fewer rows wait.
        """
        if self._is_outdated:
            self._look()
        found: List[Array] = []
        count, end = 0, self._count
        while count < size and end > 0:
            begin = max(0, end - max(_CHUNK, size))
            slots, is_live = self.index.find(self._waiting[begin:end])
            waiting = slots[is_live & ~self._is_taken[slots]]
            found.append(waiting[::-1])
            count, end = count + len(waiting), begin
        if count < size:
            raise not_enough(size, count)
        newest: Array = np.concatenate(found)[:size].astype(np.intp)
        return newest

    def deliver(self, rows: Array) -> None:
        """Take the rows of a sample. Those of a batch that was drawn ahead are taken already."""
        slots, found = self.index.find(rows)
        if self._values is not None:
            # Recorded before the rows are returned, so that a killed process never samples a row twice.
            self._values.set(slots[found], rows[found], 1.0)
        if self._ahead:
            self._ahead.popleft()
        else:
            self._take(rows)

    def draw_ahead(self, rows: Array) -> None:
        """Take the rows of a batch that is drawn ahead."""
        self._ahead.append(rows)
        self._take(rows)

    def give_back(self) -> None:
        """Let the rows of all batches that were drawn ahead wait again."""
        self._is_outdated = True
        self._is_taken[self._slots_ahead()] = False
        self._ahead.clear()

    def num_left(self) -> int:
        """Return how many rows were not sampled. Rows that are drawn ahead count."""
        return int(np.count_nonzero(~self._are_sampled(self.index.live_slots)))

    def state(self) -> Array:
        """Return which rows were sampled, by age."""
        return self._are_sampled(self.index.slots_by_age())

    def load_state(self, are_sampled: Array) -> None:
        slots = self.index.slots_by_age().astype(np.intp)
        self._ahead.clear()
        self._is_taken[slots] = are_sampled
        self._is_outdated = True
        if self._values is not None:
            self._values.drop(slots)
            sampled = slots[are_sampled]
            self._values.set(sampled, self.index.row_of_slot[sampled], 1.0)

    # Changes of the table, with its index locked.

    def published(self, slots: Array) -> None:
        self._is_taken[slots] = False
        if self._values is not None:
            # A killed push may have left values under the same row numbers.
            self._values.drop(slots)
        end = self._count + len(slots)
        if self._is_outdated or end > len(self._waiting):
            self._is_outdated = True
            return
        self._waiting[self._count : end] = self.index.row_of_slot[slots]
        self._count = end

    def removed(self, slots: Array) -> None:
        """Do nothing: a look-up skips rows that left, and they may be restored."""

    def restored(self, slots: Array) -> None:
        self._is_outdated = True

    def settled(self, slots: Array) -> None:
        self._is_taken[slots[self.index.row_of_slot[slots] != EMPTY]] = False
        self._is_outdated = True

    def cleared(self) -> None:
        self._is_taken[:] = False
        self._ahead.clear()
        self._is_outdated = True

    def resized(self, capacity: int, source: Array, target: Array) -> None:
        if len(self._is_taken) != capacity:
            self._is_taken = moved(self._is_taken, capacity, source, target, False)
        self._is_outdated = True

    def _take(self, rows: Array) -> None:
        slots, found = self.index.find(rows)
        self._is_taken[slots[found]] = True
        if self._is_outdated or not len(rows):
            return
        begin = int(np.searchsorted(self._waiting[: self._count], rows.min()))
        above = self._waiting[begin : self._count]
        slots, is_live = self.index.find(above)
        left = above[is_live & ~self._is_taken[slots]]
        self._is_outdated = True
        self._waiting[begin : begin + len(left)] = left
        self._count = begin + len(left)
        self._is_outdated = False

    def _look(self) -> None:
        """Make ``_waiting`` anew, with room for rows to come."""
        slots = self.index.slots_by_age()
        rows = self.index.row_of_slot[slots[~self._is_taken[slots]]]
        self._waiting = np.empty(len(rows) + max(len(rows) // 2, _CHUNK), np.int64)
        self._waiting[: len(rows)] = rows
        self._count = len(rows)
        self._is_outdated = False

    def _are_sampled(self, slots: Array) -> Array:
        """Return which of these slots hold a row that was sampled and delivered, bool."""
        is_sampled = self._is_taken.copy()
        is_sampled[self._slots_ahead()] = False
        return is_sampled[slots]

    def _slots_ahead(self) -> Array:
        slots, found = self.index.find(np.concatenate([NO_ROWS, *self._ahead]))
        return slots[found]


class Lifo(InOrder):
    """
    Overview:
        Samples the newest rows that were not sampled yet, newest first. New rows come before all older ones that wait.
        O(size) amortised. Sampled rows stay in the table, and do not come again. ``limited(Lifo(),
        max_times_sampled=1)`` removes them. Older rows may leave before their turn, because the table is full.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows: Optional[Stack] = None

    @property
    def _stack(self) -> Stack:
        if self._rows is None:
            raise ConfigError('the stack has no table yet. Pass the sampler to a StoreBuffer first.')
        return self._rows

    def attach(self, index: RowIndex, rows: Optional[StoredRows] = None) -> None:
        """
        Raises:
            - ConfigError: The stack belongs to another table.
        """
        if self._rows is None:
            with index.lock:
                self._rows = Stack(index)
        elif self._rows.index is not index:
            raise ConfigError('a Lifo belongs to one table. Create another Lifo for another table.')

    def persist_to(self, files: TableDirectory) -> None:
        """Restore which rows were sampled, and record each sample from now on."""
        values = files.values('taken')
        with self._stack.index.lock:
            self._stack.persist_to(values)

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        """
        Raises:
            - NotEnoughData: Fewer than ``size`` rows were not sampled yet.
            - TypeError: ``replace`` or ``sample_range`` is given.
        """
        self.refuse_options(replace, sample_range)
        return self._stack.newest(size)

    def delivered(self, rows: Array) -> Optional[Array]:
        """Count these rows as sampled. Return None: no row has to leave."""
        with self._stack.index.lock:
            self._stack.deliver(rows)
        return None

    def drawn(self, rows: Array) -> None:
        with self._stack.index.lock:
            self._stack.draw_ahead(rows)

    def returned(self, num_batches: int) -> None:
        self._stack.give_back()

    def num_left(self) -> int:
        """Return how many rows can be sampled now. Rows that are drawn ahead count."""
        with self._stack.index.lock:
            return self._stack.num_left()

    @property
    def max_times(self) -> int:
        return 1

    def state(self) -> Dict[str, Array]:
        with self._stack.index.lock:
            return {'is_sampled': self._stack.state()}

    def load_state(self, state: Mapping[str, Array]) -> None:
        with self._stack.index.lock:
            self._stack.load_state(state['is_sampled'])

    def __deepcopy__(self, memo: Dict[int, Any]) -> Lifo:
        """Return a sampler without a table. ``take_over`` copies which rows were sampled."""
        twin = memo[id(self)] = type(self)()
        return twin
