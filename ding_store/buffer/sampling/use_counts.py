"""How often rows came, and how often each may."""

from __future__ import annotations

from typing import Callable, Optional

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.persistence.slot_values import SlotValues
from ding_store.buffer.sampling.samplers import not_enough
from ding_store.buffer.table.rows import RowIndex, RowListener

#: So often is drawn again for a row that came more often in one batch than it may.
_ROUNDS = 4


class UseCounts(RowListener):
    """
    Overview:
        A count per slot, that of the row which lives there. The caller has the index locked.
    Arguments:
        - most (:obj:`int`): How often a row may come; in one batch, too.
    """

    def __init__(self, index: RowIndex, most: int) -> None:
        self._index, self.most = index, most
        self._counts = np.zeros(index.capacity, np.int32)
        self._kept: Optional[SlotValues] = None
        index.listen(self)

    def keep(self, values: SlotValues) -> Array:
        """
        Overview:
            Go on from the uses that are on record, and put them there from now on.
        Returns:
            - used_up (:obj:`np.ndarray`): Row numbers ``(n,)``.
        """
        self._kept = values
        slots = self._index.slots_by_age().astype(np.intp)
        rows: Array = self._index.row_of_slot[slots]
        uses, known = values.get(slots, rows)
        self._counts[slots[known]] = np.minimum(uses[known], self.most)
        return rows[self.are_used_up(slots)]

    def are_used_up(self, slots: Array) -> Array:
        """Which rows may not come any more, bool."""
        used_up: Array = self._counts[slots] >= self.most
        return used_up

    def count(self, rows: Array) -> Array:
        """Rows ``(B,)`` are handed out; returns those that are used up by it, each once."""
        slots, found = self._index.find(rows)
        slots, rows = slots[found], rows[found]
        np.add.at(self._counts, slots, 1)
        if self._kept is not None:
            # Before they are handed out: a row comes no more often than it may, whenever the process is killed.
            self._kept.set(slots, rows, self._counts[slots])
        used_up: Array = np.unique(rows[self.are_used_up(slots)])
        return used_up

    def of(self, rows: Array) -> Array:
        """How often rows ``(B,)`` came; 0 for those that are gone."""
        slots, found = self._index.find(rows)
        return np.where(found, self._counts[slots], 0)

    def may_come(self, rows: Array) -> bool:
        """Whether rows, which are there, may come as often as they are named."""
        return not len(self.excess(self._index.find(rows)[0]))

    def excess(self, slots: Array) -> Array:
        """Places of those that come more often than they may."""
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
            Slots that were drawn, and others in the place of those that come too often.
        Arguments:
            - draw (:obj:`Callable`): Draws so many others, which may be the same again.
            - candidates (:obj:`Callable`): All that may be drawn, for when that does not help; O(capacity).
            - discard (:obj:`Optional[Callable]`): Has distinct slots, which are used up, never be drawn again.
        Raises:
            - NotEnoughData: They have not so many uses left.
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
        # Each of them once, before any comes twice.
        ordinal = np.arange(len(spare)) - np.repeat(np.cumsum(left) - left, left)
        chosen: Array = spare[np.argsort(ordinal, kind='stable')[:num_wanted]]
        return chosen

    def take_over(self, rows: Array, counts: Array) -> None:
        """Count on from these counts of rows."""
        slots, found = self._index.find(rows)
        self._counts[slots[found]] = counts[found]

    def published(self, slots: Array) -> None:
        self._counts[slots] = 0

    def removed(self, slots: Array) -> None:
        """Their uses stay, in case they are restored."""

    def settled(self, slots: Array) -> None:
        self._counts[slots] = 0

    def resized(self, capacity: int, source: Array, target: Array) -> None:
        if len(self._counts) == capacity:
            return
        counts, known = np.zeros(capacity, np.int32), min(capacity, len(self._counts))
        counts[:known] = self._counts[:known]
        counts[target] = self._counts[source]
        self._counts = counts
