"""Counts of how often rows were sampled, with a limit per row."""

from __future__ import annotations

from typing import Callable, Optional

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.persistence.slot_values import SlotValues
from ding_store.buffer.samplers.base import not_enough
from ding_store.buffer.table.rows import RowIndex, RowListener

#: The number of redraws for rows that exceed their limit within one batch.
_ROUNDS = 4


class UseCounts(RowListener):
    """
    Overview:
        A use count per slot, for the row in that slot. The caller holds the index's lock.
    Arguments:
        - most (:obj:`int`): The limit of uses per row, including repeats in one batch.
    """

    def __init__(self, index: RowIndex, most: int) -> None:
        self._index, self.most = index, most
        self._counts = np.zeros(index.capacity, np.int32)
        self._kept: Optional[SlotValues] = None
        index.listen(self)

    def keep(self, values: SlotValues) -> Array:
        """
        Overview:
            Restore the recorded uses, and record them from now on.
        Returns:
            - used_up (:obj:`np.ndarray`): The rows at the limit ``(n,)``.
        """
        self._kept = values
        slots = self._index.slots_by_age().astype(np.intp)
        rows: Array = self._index.row_of_slot[slots]
        uses, known = values.get(slots, rows)
        self._counts[slots[known]] = np.minimum(uses[known], self.most)
        return rows[self.are_used_up(slots)]

    def are_used_up(self, slots: Array) -> Array:
        """Return which rows may not come any more, bool."""
        used_up: Array = self._counts[slots] >= self.most
        return used_up

    def count(self, rows: Array) -> Array:
        """Count a use of each of these rows ``(B,)``. Return the rows that are then used up, each once."""
        slots, found = self._index.find(rows)
        slots, rows = slots[found], rows[found]
        np.add.at(self._counts, slots, 1)
        if self._kept is not None:
            # Recorded before the rows are returned: after a kill, no row comes more often than its limit.
            self._kept.set(slots, rows, self._counts[slots])
        used_up: Array = np.unique(rows[self.are_used_up(slots)])
        return used_up

    def of(self, rows: Array) -> Array:
        """Return how often rows ``(B,)`` came. 0 for rows that are gone."""
        slots, found = self._index.find(rows)
        return np.where(found, self._counts[slots], 0)

    def may_come(self, rows: Array) -> bool:
        """Return whether these live rows may come once more for each time they are listed."""
        return not len(self.excess(self._index.find(rows)[0]))

    def excess(self, slots: Array) -> Array:
        """Return the places of slots that would exceed the limit."""
        order = np.argsort(slots, kind='stable')
        ordered = slots[order]
        begins = np.flatnonzero(np.diff(ordered, prepend=-1) != 0)
        ordinal = np.arange(len(slots)) - np.repeat(begins, np.diff(begins, append=len(slots)))
        excess: Array = order[ordinal + self._counts[ordered] >= self.most]
        return excess

    def within(
        self,
        slots: Array,
        draw: Callable[[int], Array],
        candidates: Callable[[], Array],
        discard: Optional[Callable[[Array], None]] = None,
    ) -> Array:
        """
        Overview:
            Return drawn slots, with others in place of those that would exceed the limit.
        Arguments:
            - draw (:obj:`Callable`): Draws so many other slots, possibly the same ones.
            - candidates (:obj:`Callable`): Returns all slots that may be drawn. Used if redraws do not help.
              O(capacity).
            - discard (:obj:`Optional[Callable]`): Removes distinct slots that are used up from later draws.
        Raises:
            - NotEnoughData: The candidates have fewer uses left.
        """
        for _ in range(_ROUNDS):
            excess = self.excess(slots)
            if not len(excess):
                return slots
            if discard is not None:
                discard(np.unique(slots[self.are_used_up(slots)]))
            slots[excess] = draw(len(excess))
        excess = self.excess(slots)
        slots[excess] = self._spare(np.delete(slots, excess), candidates(), len(slots))
        return slots

    def _spare(self, kept: Array, candidates: Array, size: int) -> Array:
        taken = np.zeros(self._index.capacity, np.int64)
        np.add.at(taken, kept, 1)
        num_wanted = size - len(kept)
        left = np.minimum(np.maximum(self.most - self._counts[candidates] - taken[candidates], 0), num_wanted)
        spare: Array = np.repeat(candidates, left)
        if len(spare) < num_wanted:
            raise not_enough(size, len(kept) + len(spare), 'uses')
        # Take each slot once before any comes twice.
        ordinal = np.arange(len(spare)) - np.repeat(np.cumsum(left) - left, left)
        chosen: Array = spare[np.argsort(ordinal, kind='stable')[:num_wanted]]
        return chosen

    def take_over(self, rows: Array, counts: Array) -> None:
        """Continue from these counts of rows."""
        slots, found = self._index.find(rows)
        self._counts[slots[found]] = counts[found]

    def published(self, slots: Array) -> None:
        self._counts[slots] = 0

    def removed(self, slots: Array) -> None:
        """Do nothing: the counts stay, because the rows may be restored."""

    def settled(self, slots: Array) -> None:
        self._counts[slots] = 0

    def resized(self, capacity: int, source: Array, target: Array) -> None:
        if len(self._counts) == capacity:
            return
        counts, known = np.zeros(capacity, np.int32), min(capacity, len(self._counts))
        counts[:known] = self._counts[:known]
        counts[target] = self._counts[source]
        self._counts = counts
