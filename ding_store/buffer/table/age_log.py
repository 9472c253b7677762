"""The rows of a table in the order of age."""

from __future__ import annotations

from typing import Any, List

import numpy as np

from ding_store.buffer.array_types import Array


class AgeLog:
    """
    Overview:
        Holds (row, slot) in the order of row numbers. Rows that were deleted stay in it until they are skipped or
        packed away, which costs O(1) amortised. The lock of the index is held for all methods.
    Arguments:
        - row_of_slot (:obj:`np.ndarray`): Row numbers by slot. An entry is live while its slot carries its row.
        - by_age (:obj:`np.ndarray`): The slots of all live rows, oldest first.
        - slot_type (:obj:`Any`): The dtype of slots.
    """

    __slots__ = ('_row_of_slot', 'head', 'rows', 'slots', 'tail')

    def __init__(self, row_of_slot: Array, by_age: Array, slot_type: Any) -> None:
        capacity, count = len(row_of_slot), len(by_age)
        size = capacity + max(capacity // 2, 64)
        self._row_of_slot = row_of_slot
        #: Entries ``head`` to ``tail`` are in use.
        self.rows = np.empty(size, np.int64)
        self.slots = np.empty(size, slot_type)
        self.head, self.tail = 0, count
        self.rows[:count], self.slots[:count] = row_of_slot[by_age], by_age

    def clear(self) -> None:
        self.head = self.tail = 0

    def by_age(self, count: int) -> Array:
        """Return the slots of all ``count`` live rows as a view, oldest first. O(1) without deletes."""
        if self.tail - self.head != count:
            self.pack()
        return self.slots[self.head : self.tail]

    def num_from(self, row: int, count: int) -> int:
        """Return how many of the ``count`` live rows have this number or a larger one."""
        rows = self.rows[self.head : self.head + len(self.by_age(count))]
        return len(rows) - int(np.searchsorted(rows, row))

    def find(self, rows: Array, slots: Array, found: Array) -> None:
        """Find those rows that are not ``found`` yet. Write their slots, and whether they are live."""
        if self.head == self.tail:
            return
        missing = np.flatnonzero(~found)
        wanted = rows[missing]
        places = np.searchsorted(self.rows[self.head : self.tail], wanted)
        np.minimum(places, self.tail - self.head - 1, out=places)
        candidates = self.slots[self.head + places]
        slots[missing] = candidates
        found[missing] = self._row_of_slot[candidates] == wanted

    def take_one(self) -> int:
        """Return the slot of ``take(1)``, without the fixed cost of array operations."""
        head = self.head
        slot: int = self.slots.item(head)
        if self._row_of_slot.item(slot) != self.rows.item(head):
            return int(self.take(1)[0])
        self.head = head + 1
        return slot

    def take(self, num_rows: int) -> Array:
        """Return the slots of the oldest live rows. Move the head past them and past deleted rows before them."""
        end = self.head + num_rows
        oldest = self.slots[self.head : end].astype(np.intp)
        if end <= self.tail and (self._row_of_slot[oldest] == self.rows[self.head : end]).all():
            self.head = end
            return oldest
        taken: List[Array] = []
        while num_rows > 0:
            if self.head == self.tail:
                raise RuntimeError('the log of rows has ended before the rows have: it was changed without the lock')
            # Look at several entries at a time: after many deletes most of the entries are of deleted rows.
            end = min(self.head + max(num_rows, 32), self.tail)
            slots = self.slots[self.head : end]
            alive = np.flatnonzero(self._row_of_slot[slots] == self.rows[self.head : end])[:num_rows]
            taken.append(slots[alive].astype(np.intp))
            num_rows -= len(alive)
            self.head = end if num_rows else self.head + int(alive[-1]) + 1
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    def pack(self) -> None:
        """Drop the entries of deleted rows."""
        rows, slots = self.rows[self.head : self.tail], self.slots[self.head : self.tail]
        alive = self._row_of_slot[slots] == rows
        num_alive = int(np.count_nonzero(alive))
        # Indexing by a mask copies, so the regions may overlap.
        self.rows[:num_alive] = rows[alive]
        self.slots[:num_alive] = slots[alive]
        self.head, self.tail = 0, num_alive
