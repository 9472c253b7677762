"""Which rows belong together."""

from __future__ import annotations

from typing import Dict, Hashable

import numpy as np


class Groups:
    """The group of every slot: ``codes[slot]`` is a number for the value of the key, or NONE."""

    NONE = -1

    def __init__(self, capacity: int) -> None:
        self.codes = np.full(capacity, self.NONE, np.int64)
        self._code_of: Dict[Hashable, int] = {}

    def code(self, value: Hashable) -> int:
        # Episodes come and go: numbers of values that left are never used again, but must not be kept for ever.
        if len(self._code_of) > 2 * len(self.codes) + 1024:
            self._forget_unused()
        return self._code_of.setdefault(value, self._next_code())

    def value_of(self) -> Dict[int, Hashable]:
        return {code: value for value, code in self._code_of.items()}

    def _next_code(self) -> int:
        return next(reversed(self._code_of.values())) + 1 if self._code_of else 0

    def _forget_unused(self) -> None:
        used = set(self.codes.tolist())
        self._code_of = {value: code for value, code in self._code_of.items() if code in used}
