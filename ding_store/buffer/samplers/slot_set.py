"""Sets of slots: one with uniform draws, and one of changes that a sampler has not applied yet."""

from __future__ import annotations

import weakref
from typing import Callable, Protocol

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.interrupts import finish


class SlotSetListener(Protocol):
    """An object that follows the changes of a SlotSet."""

    def starts_changed(self, slots: Array) -> None:
        """Handle slots that became members or stopped being members. Repeated if an exception interrupts it."""


class SlotSet:
    """
    Overview:
        A set of slots. Members are dense in an array, so a draw is one look-up and a discard one swap.
        O(len(slots)) each.
    Arguments:
        - capacity (:obj:`int`): All slots are below it. Each uses 8 bytes.
    """

    def __init__(self, capacity: int) -> None:
        self._members = np.empty(capacity, np.int32)
        self._place = np.full(capacity, -1, np.int32)
        self._count = 0
        self._listeners: weakref.WeakSet[SlotSetListener] = weakref.WeakSet()

    def listen(self, listener: SlotSetListener) -> None:
        """Call this listener after each change, while another reference keeps it alive."""
        self._listeners.add(listener)

    def __len__(self) -> int:
        return self._count

    @property
    def members(self) -> Array:
        """The slots in the set, unordered: a view that is valid until the next change."""
        return self._members[: self._count]

    def add(self, slots: Array) -> None:
        """Add distinct slots that are not in the set."""
        end = self._count + len(slots)
        places = np.arange(self._count, end, dtype=np.int32)
        try:
            # Assignments only, without a Python call in between: see ``interrupts``.
            self._members[self._count : end] = slots
            self._place[slots] = places
            self._count = end
            self._tell(slots)
        except BaseException:
            finish(lambda: self._tell(slots))
            raise

    def contains(self, slots: Array) -> Array:
        """Return which slots are in the set, bool."""
        are_in: Array = self._place[slots] >= 0
        return are_in

    def discard(self, slots: Array) -> None:
        """Remove distinct slots. Slots that are not in the set are ignored."""
        places = self._place[slots]
        is_in = places >= 0
        if not is_in.any():
            return
        slots, places = slots[is_in], places[is_in]
        remaining = self._count - len(slots)
        try:
            # Assignments only, without a Python call in between: see ``interrupts``.
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


class PendingSlots:
    """
    Overview:
        Collects slots whose rows came or left. At a limit it applies them all at once.
    Arguments:
        - apply (:obj:`Callable`): Receives slots ``(n,)``, possibly repeated. After an interrupt it receives the same
          slots again.
        - limit (:obj:`int`): The maximum number of slots to collect.
    """

    def __init__(self, apply: Callable[[Array], None], limit: int = 4096) -> None:
        self._apply = apply
        self._slots = np.empty(limit, np.int64)
        self._count = 0

    def add(self, slots: Array) -> None:
        end = self._count + len(slots)
        if end > len(self._slots):
            self.flush()
            end = len(slots)
            if end > len(self._slots):
                self._apply(slots.astype(np.int64))
                return
        self._slots[self._count : end] = slots
        self._count = end

    def take_back(self, slots: Array) -> None:
        """Undo the last ``add`` of these slots. If it was applied already, add them again as a new change."""
        start = max(0, self._count - len(slots))
        if np.array_equal(self._slots[start : self._count], slots):
            self._count = start
        else:
            self.add(slots)

    def flush(self) -> None:
        """Apply all collected slots."""
        if self._count:
            self._apply(self._slots[: self._count].copy())
            self._count = 0

    def clear(self) -> None:
        self._count = 0
