"""A set of slots that is drawn from uniformly and changed in bulk."""

from __future__ import annotations

import weakref
from typing import Protocol

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.interrupts import finish


class SlotSetListener(Protocol):
    """Somebody who keeps something of the members."""

    def starts_changed(self, slots: Array) -> None:
        """These became members, or are none any longer. Called again if an exception interrupts it."""


class SlotSet:
    """
    Overview:
        The members are dense in an array, so that a draw is one look-up and a discard one swap: O(len(slots)) each.
    Arguments:
        - capacity (:obj:`int`): Slots are below it. 8 bytes each.
    """

    def __init__(self, capacity: int) -> None:
        self._members = np.empty(capacity, np.int32)
        self._place = np.full(capacity, -1, np.int32)
        self._count = 0
        self._listeners: weakref.WeakSet[SlotSetListener] = weakref.WeakSet()

    def listen(self, listener: SlotSetListener) -> None:
        """Tell somebody of all changes from now on, for as long as somebody else holds it."""
        self._listeners.add(listener)

    def __len__(self) -> int:
        return self._count

    @property
    def members(self) -> Array:
        """The slots in it, in no order: a view, good until the next change."""
        return self._members[: self._count]

    def add(self, slots: Array) -> None:
        """Add distinct slots that are not in it."""
        end = self._count + len(slots)
        places = np.arange(self._count, end, dtype=np.int32)
        try:
            # No call from here on: see ``interrupts``.
            self._members[self._count : end] = slots
            self._place[slots] = places
            self._count = end
            self._tell(slots)
        except BaseException:
            finish(lambda: self._tell(slots))
            raise

    def contains(self, slots: Array) -> Array:
        """Which slots are in it, bool."""
        are_in: Array = self._place[slots] >= 0
        return are_in

    def discard(self, slots: Array) -> None:
        """Take distinct slots out, those of them that are in it."""
        places = self._place[slots]
        is_in = places >= 0
        if not is_in.any():
            return
        slots, places = slots[is_in], places[is_in]
        remaining = self._count - len(slots)
        try:
            # No call from here on: see ``interrupts``.
            self._place[slots] = -1
            tail = self._members[remaining : self._count]
            moved = tail[self._place[tail] >= 0]
            gaps = places[places < remaining]
            self._members[gaps] = moved
            self._place[moved] = gaps
            self._count = remaining
            self._tell(slots)
        except BaseException:
            finish(lambda: self._tell(slots))
            raise

    def _tell(self, slots: Array) -> None:
        for listener in self._listeners:
            listener.starts_changed(slots)
