"""Changes of rows that a sampler has not looked at yet, so that a push costs it next to nothing."""

from __future__ import annotations

from typing import Callable

import numpy as np

from ding_store.buffer.array_types import Array


class PendingSlots:
    """
    Overview:
        Slots whose rows came or went, up to a limit; then they are applied all at once.
    Arguments:
        - apply (:obj:`Callable`): Takes slots ``(n,)``, some of them repeated; the same again if it is interrupted.
        - limit (:obj:`int`): How many are kept.
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
        """Undo the last ``add`` of these slots, unless it was applied meanwhile: then they changed again."""
        start = max(0, self._count - len(slots))
        if np.array_equal(self._slots[start : self._count], slots):
            self._count = start
        else:
            self.add(slots)

    def flush(self) -> None:
        """Apply what there is."""
        if self._count:
            self._apply(self._slots[: self._count].copy())
            self._count = 0

    def clear(self) -> None:
        self._count = 0
