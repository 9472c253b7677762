"""A batch of row changes that a sampler has not applied yet, so that a push costs it almost nothing."""

from __future__ import annotations

from typing import Callable

import numpy as np

from ding_store.buffer.array_types import Array


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
