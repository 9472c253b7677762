"""The group of each row, by the value of a key."""

from __future__ import annotations

from typing import Dict, Hashable

import numpy as np

from ding_store.buffer.array_types import Array


class Groups:
    """
    Overview:
        The group of every slot. ``codes[slot]`` is a number for the value of the key, or NONE. ``num_moves`` counts
        changes of groups after the push.
    """

    NONE = -1

    def __init__(self, capacity: int) -> None:
        self.codes = np.full(capacity, self.NONE, np.int64)
        self.num_moves = 0
        self._code_of: Dict[Hashable, int] = {}
        self._num_codes = 0

    @property
    def is_used(self) -> bool:
        """True if any row ever had the key."""
        return self._num_codes > 0

    def code(self, value: Hashable) -> int:
        # Episodes come and go. Codes of values that left are never used again, so they must not pile up.
        if len(self._code_of) > 2 * len(self.codes) + 1024:
            self._forget_unused()
        code = self._code_of.get(value)
        if code is None:
            code = self._code_of[value] = self._num_codes
            self._num_codes += 1
        return code

    def move(self, slot: int, code: int, is_live: bool) -> None:
        """Set the group of a slot's row. ``is_live`` is False for a new row."""
        if is_live and self.codes[slot] != code:
            self.num_moves += 1
        self.codes[slot] = code

    def leave(self, slots: Array, is_live: Array) -> None:
        """Remove the rows of these slots from all groups."""
        if (self.codes[slots[is_live]] != self.NONE).any():
            self.num_moves += 1
        self.codes[slots] = self.NONE

    def clear(self) -> None:
        """Remove all rows."""
        self.codes.fill(self.NONE)
        self._code_of = {}

    def value_of(self) -> Dict[int, Hashable]:
        return {code: value for value, code in self._code_of.items()}

    def _forget_unused(self) -> None:
        used = set(self.codes.tolist())
        self._code_of = {value: code for value, code in self._code_of.items() if code in used}
