"""The index of rows: row numbers, their slots, and their order of age. It takes about 34 bytes per row of capacity."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from ding_store.buffer.array_types import Array, filled
from ding_store.buffer.forks import hold_over_forks
from ding_store.buffer.interrupts import finish
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.kernels.load import load_kernels
from ding_store.buffer.table.age_log import AgeLog

NO_ROWS = np.empty(0, np.int64)


class RowListener:
    """
    Base of objects that keep a value per slot. The index calls them after each change, with its lock held. After an
    exception in a call, it calls ``restored``, ``cleared`` or ``resized`` again, and ``settled`` instead of the others.
    """

    def published(self, slots: Array) -> None:
        """New rows were published in these slots."""

    def published_one(self, slot: int) -> None:
        """A new row was published in this slot. Override it only to avoid the cost of an array."""
        self.published(np.array([slot], np.intp))

    def removed(self, slots: Array) -> None:
        """The rows of these slots left."""

    def removed_one(self, slot: int) -> None:
        """The row of this slot left, see ``published_one``."""
        self.removed(np.array([slot], np.intp))

    def restored(self, slots: Array) -> None:
        """The rows that left these slots last are back."""

    def cleared(self) -> None:
        """All rows left."""

    def loaded(self) -> None:
        """Take notice that all rows came from a file of ``save_data``, perhaps of another run."""

    def settled(self, slots: Array) -> None:
        """
        An exception interrupted the removal or the publication of rows in these slots. ``removed`` or ``published`` may
        have run.
        """

    def resizing(self) -> None:
        """Slots are about to be renumbered: finish all deferred work now."""

    def resized(self, capacity: int, source: Array, target: Array) -> None:
        """
        There are ``capacity`` slots now. Rows moved from ``source`` slots to ``target`` slots. No row was removed.
        """


class Listeners:
    """The listeners of an index. It holds only weak references to them."""

    def __init__(self) -> None:
        self._listeners: List[weakref.ref[RowListener]] = []

    def add(self, listener: RowListener) -> None:
        """Add a listener, unless it is there."""
        if not any(listener is each for each in self.alive()):
            self._listeners.append(weakref.ref(listener, self._listeners.remove))

    def alive(self) -> List[RowListener]:
        return [listener for reference in self._listeners if (listener := reference()) is not None]


class RowIndex:
    """
    Overview:
        Maps row numbers to slots. Row numbers only grow and are never reused. A row is live while its slot still
        carries its number. The caller must hold ``lock`` for all methods. Only ``row_of_slot`` may be read without it.

        * ``_slots`` is a permutation of all slots: the first ``count`` are live, the rest free. A uniform draw is one
          look-up, and a delete is one swap. ``_place`` is the inverse permutation.
        * ``_log`` knows the order of age.
    Arguments:
        - capacity (:obj:`int`): The number of slots.
        - row_of_slot (:obj:`Optional[np.ndarray]`): The array that holds the row numbers, with those of existing rows:
          EMPTY, or distinct numbers below ``next_row``. Every change of a row is one 8-byte store to it.
    """

    def __init__(self, capacity: int, row_of_slot: Optional[Array] = None, next_row: int = 0) -> None:
        self.lock = hold_over_forks(threading.RLock())
        #: None if numba is not available.
        self.kernels = load_kernels()
        self.next_row = next_row
        #: Row numbers below this one may have metas on disk, for rows that never became live.
        self.promised_row = next_row
        #: Receives a number, and returns the slots of as many rows that leave for new ones. None: the oldest leave.
        self.remover: Optional[Callable[[int], Array]] = None
        self._listeners = Listeners()
        self._build(filled(capacity, EMPTY, np.int64) if row_of_slot is None else row_of_slot)

    def _build(self, row_of_slot: Array) -> None:
        """Derive all other state from the row numbers of the slots."""
        self.row_of_slot = row_of_slot
        self.capacity = capacity = len(row_of_slot)
        slot_type = np.int32 if capacity <= np.iinfo(np.int32).max else np.int64
        # The kernels are compiled for slots of 4 bytes.
        self._loops = self.kernels if slot_type is np.int32 else None
        live = np.flatnonzero(row_of_slot != EMPTY)
        by_age = live[np.argsort(row_of_slot[live])]
        # Free slots are in ascending order: slots that were written before come first and need no new space.
        self._slots = np.concatenate([by_age, np.flatnonzero(row_of_slot == EMPTY)]).astype(slot_type)
        self._place = np.empty(capacity, slot_type)
        self._place[self._slots] = np.arange(capacity, dtype=slot_type)
        self._log = AgeLog(row_of_slot, by_age, slot_type)
        self.count = len(live)

    def __deepcopy__(self, memo: Dict[int, Any]) -> None:
        """Return None: a copied sampler belongs to no table."""

    def listen(self, listener: RowListener) -> None:
        """Call a listener for all changes from now on. The index holds only a weak reference to it."""
        self._listeners.add(listener)

    @property
    def live_slots(self) -> Array:
        """Slots of all live rows in no order. A view that is valid while the lock is held."""
        live: Array = self._slots[: self.count]
        return live

    def allocate(self, num_rows: int) -> Tuple[Array, Array]:
        """
        Overview:
            Reserve slots for ``num_rows`` new rows, at most the capacity. The oldest rows are evicted if there is no
            room, or those that ``remover`` chooses. The slots belong to the caller until ``publish`` or ``restore``.
        Returns:
            - slots (:obj:`np.ndarray`): The slots.
            - evicted (:obj:`np.ndarray`): Row numbers of the evicted rows. They were in the first of these slots.
        """
        shortage = self.count + num_rows - self.capacity
        retired, evicted = self._retire(shortage) if shortage > 0 else (NO_ROWS, NO_ROWS)
        if shortage == num_rows:
            return retired, evicted
        return self._slots[self.count : self.count + num_rows].astype(np.intp), evicted

    def allocate_one(self) -> int:
        """Reserve the slot of one new row, like ``allocate``, without the fixed cost of array operations."""
        if self.count < self.capacity:
            return int(self._slots[self.count])
        if self.remover is not None:
            return int(self.allocate(1)[0][0])
        slot = -1
        try:
            slot = self._log.take_one()
            self._remove_one(slot)
            for listener in self._listeners.alive():
                listener.removed_one(slot)
        except BaseException:
            freed = slot >= 0 and self.row_of_slot[slot] == EMPTY
            self._settle(np.array([slot] if freed else [], np.intp))
            raise
        return slot

    def restore(self, slots: Array, evicted: Array) -> None:
        """Undo ``allocate`` before anything was written: the evicted rows are live again. O(capacity)."""
        self._log.pack()
        back = slots[: len(evicted)]

        def restore() -> None:
            self.row_of_slot[back] = evicted
            if len(back):
                self._build(self.row_of_slot)
            for listener in self._listeners.alive():
                listener.restored(back)

        finish(restore)

    def publish(self, slots: Array, skipped: int = 0) -> None:
        """
        Overview:
            Make the rows live that were written to the slots of the last ``allocate``. O(len(slots)).
        Arguments:
            - skipped (:obj:`int`): How many row numbers to use up first, for rows that never become live.
        """
        num_rows, first = len(slots), self.next_row + skipped
        if num_rows == 1:
            self.publish_one(slots.item(0), first)
            return
        log = self._log
        tail = log.tail
        if tail + num_rows > len(log.rows):
            log.pack()
            tail = log.tail
        publish = _publish_in_numpy if self._loops is None else self._loops.publish
        try:
            log.tail = tail + num_rows
            self.next_row = first + num_rows
            self.count += num_rows
            publish(self.row_of_slot, log.rows, log.slots, tail, slots, first)
            for listener in self._listeners.alive():
                listener.published(slots)
        except BaseException:
            self._settle(slots)
            raise

    def publish_one(self, slot: int, row: int) -> None:
        """
        Make a row live that was written to the slot of the last ``allocate_one``. Compiled code and operations on
        arrays take several times as long for one row.
        """
        log = self._log
        if log.tail == len(log.rows):
            log.pack()
        tail = log.tail
        try:
            log.tail, self.next_row, self.count = tail + 1, row + 1, self.count + 1
            log.rows[tail], log.slots[tail], self.row_of_slot[slot] = row, slot, row
            for listener in self._listeners.alive():
                listener.published_one(slot)
        except BaseException:
            self._settle(np.array([slot], np.intp))
            raise

    def remove(self, slots: Array) -> None:
        """Free distinct slots of live rows. The last live slots fill the gaps in ``_slots``. O(len(slots))."""
        try:
            if len(slots) == 1:
                self._remove_one(int(slots[0]))
            else:
                self._remove_many(slots)
            self._tell_removed(slots)
        except BaseException:
            self._settle(slots[self.row_of_slot[slots] == EMPTY])  # those that are free now
            raise

    def clear(self) -> None:
        """Free every slot. Row numbers continue to grow."""

        def clear() -> None:
            self.row_of_slot[:] = EMPTY
            self._slots[:] = np.arange(self.capacity, dtype=self._slots.dtype)
            self._place[:] = self._slots
            self.count = 0
            self._log.clear()
            for listener in self._listeners.alive():
                listener.cleared()

        finish(clear)

    def forget(self) -> None:
        """Free every slot like ``clear``, but leave the present ``row_of_slot`` array unchanged."""

        def forget() -> None:
            self._build(filled(self.capacity, EMPTY, np.int64))
            for listener in self._listeners.alive():
                listener.cleared()

        finish(forget)

    def tell_loaded(self) -> None:
        """Notify listeners that rows from a file replaced all rows."""
        for listener in self._listeners.alive():
            listener.loaded()

    def oldest(self, num_rows: int) -> Array:
        """Return the slots of the ``num_rows`` oldest live rows, or of all if there are fewer, as a copy."""
        return self.slots_by_age()[:num_rows].astype(np.intp)

    def leaving(self, num_rows: int) -> Array:
        """Return the slots of the ``num_rows`` rows that leave next if there is no room."""
        return self.oldest(num_rows) if self.remover is None else self.remover(num_rows)

    def relocations(self, capacity: int) -> Tuple[Array, Array]:
        """
        Overview:
            Plan a shrink to ``capacity`` slots, which must be at least ``count``. Return the live slots beyond it, and
            an equal number of free slots below it.
        """
        for listener in self._listeners.alive():
            listener.resizing()
        source = np.flatnonzero(self.row_of_slot[capacity:] != EMPTY) + capacity
        target = np.flatnonzero(self.row_of_slot[:capacity] == EMPTY)[: len(source)]
        return source, target

    def relocate(self, source: Array, target: Array) -> None:
        """Record that rows were copied from ``source`` to free ``target`` slots. ``resize`` or ``stay`` must follow."""
        # The old slots keep their row numbers until they are cut off: a crash leaves two equal copies of a row, and
        # never none.
        self.row_of_slot[target] = self.row_of_slot[source]

    def stay(self, target: Array) -> None:
        """Undo ``relocate``: the target slots are free again, and the rows stay in their old slots."""
        self.row_of_slot[target] = EMPTY

    def resize(self, row_of_slot: Array, source: Array, target: Array) -> None:
        """
        Switch to another number of slots with the same rows. The rows of ``source`` slots are in ``target`` slots.
        """

        def resize() -> None:
            self._build(row_of_slot)
            for listener in self._listeners.alive():
                listener.resized(self.capacity, source, target)

        finish(resize)

    def findings(self) -> List[str]:
        """Return all inconsistencies. There are none unless memory was damaged or this code is wrong."""
        live = self.live_slots
        rows = self.row_of_slot[live]
        by_age = self.row_of_slot[self.slots_by_age()]
        checks = {
            f'row numbers are not all in 0 to {self.next_row}': ((rows >= 0) & (rows < self.next_row)).all(),
            'a row number is in two slots': len(np.unique(rows)) == self.count,
            'free slots have row numbers': (self.row_of_slot[self._slots[self.count :]] == EMPTY).all(),
            'slots are no permutation': np.array_equal(np.sort(self._slots), np.arange(self.capacity)),
            'places are not those of the slots': np.array_equal(self._slots[self._place], np.arange(self.capacity)),
            'the order of age is not that of row numbers': (by_age[1:] > by_age[:-1]).all()
            and len(by_age) == len(live),
        }
        return [what for what, holds in checks.items() if not holds]

    def load(self, rows: Array, row_of_slot: Optional[Array] = None) -> None:
        """
        Overview:
            Make rows live in the first slots, after ``forget``. They are below ``next_row`` and in order of age.
        Arguments:
            - row_of_slot (:obj:`Optional[np.ndarray]`): The array that holds row numbers from now on. It contains those
              of the rows already.
        """
        if row_of_slot is None:
            self.row_of_slot[: len(rows)] = rows
        slots = np.arange(len(rows))
        try:
            self._build(self.row_of_slot if row_of_slot is None else row_of_slot)
            for listener in self._listeners.alive():
                listener.published(slots)
        except BaseException:
            self.row_of_slot = self.row_of_slot if row_of_slot is None else row_of_slot
            self._settle(slots)
            raise

    def find(self, rows: Array) -> Tuple[Array, Array]:
        """
        Overview:
            Find the slots of rows. O(1) per row while no row was deleted out of order, else O(log(capacity)).
        Returns:
            - slots (:obj:`np.ndarray`): The slot of each row, or any valid slot if the row is gone.
            - found (:obj:`np.ndarray`): Whether each row is live, bool.
        """
        slots = rows % self.capacity
        found = self.row_of_slot[slots] == rows
        if not found.all():
            self._log.find(rows, slots, found)
        return slots, found & (rows >= 0)

    def slots_by_age(self) -> Array:
        """
        Return the slots of all live rows, oldest first, as a view that is valid while the lock is held. O(1) without
        deletes.
        """
        return self._log.by_age(self.count)

    def num_from(self, row: int) -> int:
        """Return how many live rows have this number or a larger one. O(log(count)) without deletes."""
        return self._log.num_from(row, self.count)

    def _settle(self, slots: Array) -> None:
        """Rebuild all state from the row numbers, after an exception interrupted a change of these slots."""

        def settle() -> None:
            self._build(self.row_of_slot)
            for listener in self._listeners.alive():
                listener.settled(slots)

        finish(settle)

    def _tell_removed(self, slots: Array) -> None:
        for listener in self._listeners.alive():
            listener.removed(slots)

    def _retire(self, num_rows: int) -> Tuple[Array, Array]:
        """Evict rows. Return their slots, which are the next free ones in this order, and their numbers."""
        if self.remover is not None:
            leaving = self.remover(num_rows)
            rows = self.row_of_slot[leaving]
            self.remove(leaving)
            return leaving, rows
        log, oldest = self._log, NO_ROWS
        head, end = log.head, log.head + num_rows
        try:
            if num_rows > 1 and end <= log.tail and self._loops is not None:
                oldest, rows = np.zeros(num_rows, np.int64), np.empty(num_rows, np.int64)
                index = self.row_of_slot, self._slots, self._place, log.rows, log.slots
                if self._loops.retire(*index, head, self.count, oldest, rows):
                    log.head, self.count = end, self.count - num_rows
                    self._tell_removed(oldest)
                    return oldest, rows
            oldest = np.array([log.take_one()], np.intp) if num_rows == 1 else log.take(num_rows)
            rows = self.row_of_slot[oldest]
            self.remove(oldest)
            return oldest, rows
        except BaseException:
            self._settle(oldest[self.row_of_slot[oldest] == EMPTY])
            raise

    def _remove_many(self, slots: Array) -> None:
        free = _free_in_numpy if self._loops is None else self._loops.free
        free(self.row_of_slot, self._slots, self._place, np.ascontiguousarray(slots, np.int64), self.count)
        self.count -= len(slots)

    def _remove_one(self, slot: int) -> None:
        # Same result as ``_remove_many`` without the fixed cost of a dozen array operations. Every push to a full table
        # runs this.
        last = self.count - 1
        place, moved = self._place[slot], self._slots[last]
        self.row_of_slot[slot] = EMPTY
        self._slots[place], self._place[moved] = moved, place
        self._slots[last], self._place[slot] = slot, last
        self.count = last


def _publish_in_numpy(
    row_of_slot: Array, log_rows: Array, log_slots: Array, tail: int, slots: Array, first: int
) -> None:
    """Do what ``row_kernels.publish`` does."""
    rows = np.arange(first, first + len(slots), dtype=np.int64)
    log_rows[tail : tail + len(slots)] = rows
    log_slots[tail : tail + len(slots)] = slots
    row_of_slot[slots] = rows


def _free_in_numpy(row_of_slot: Array, slots: Array, place: Array, freed: Array, count: int) -> None:
    """Do what ``row_kernels.free`` does."""
    row_of_slot[freed] = EMPTY
    remaining = count - len(freed)
    tail = slots[remaining:count]
    moved = tail[row_of_slot[tail] != EMPTY]
    places = place[freed]
    gaps = places[np.less(places, remaining)]
    slots[gaps] = moved
    place[moved] = gaps
    # Keep the given order: the slot of the oldest row is used next, so that slots stay in the order of age.
    slots[remaining:count] = freed
    place[freed] = np.arange(remaining, count, dtype=place.dtype)
