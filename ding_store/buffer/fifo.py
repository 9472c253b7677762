"""A queue: rows in the order in which they were pushed, each once."""

from __future__ import annotations

import threading
from typing import Any, Dict, Optional

import numpy as np

from ding_store.buffer.arrays import Array
from ding_store.buffer.rows import RowIndex
from ding_store.buffer.samplers import not_enough
from ding_store.errors import ConfigError

#: Row numbers that are looked up together: deleted rows leave holes, which are passed over once.
_CHUNK = 1024


class Fifo:
    """
    Overview:
        The oldest rows that were not sampled yet, as on-policy learners want them (IMPALA, PPO). O(size) amortised. The
        rows stay in the table; ``limited(Fifo(), max_times_sampled=1)`` takes them out. Rows that leave before their
        turn, because the table is full, are passed over and counted.
    """

    def __init__(self) -> None:
        #: Samples through this sampler take turns, so that no two of them get the same rows.
        self.lock = threading.RLock()
        self._index: Optional[RowIndex] = None
        self._next = 0
        #: Rows that left before they were sampled.
        self.num_missed = 0

    def attach(self, index: RowIndex) -> None:
        if self._index is index:
            return
        if self._index is not None:
            raise ConfigError('a Fifo is at one place in one table: make another one for another table')
        self._index = index
        index.listen(self)

    def choose(self, index: RowIndex, size: int, replace: bool = False, sample_range: Optional[slice] = None) -> Array:
        """
        Raises:
            - NotEnoughData: So many were not pushed since the last sample.
            - TypeError: ``replace`` or ``sample_range`` is given.
        """
        if replace or sample_range is not None:
            raise TypeError(f'a Fifo samples every row once: no replace ({replace}), no sample_range ({sample_range})')
        found, count, row = [], 0, self._next
        while count < size and row < index.next_row:
            rows = np.arange(row, min(row + max(_CHUNK, size), index.next_row), dtype=np.int64)
            slots, is_live = index.find(rows)
            live = slots[is_live]
            if not count and not len(live):
                self._pass_over(len(rows))
            found.append(live)
            count, row = count + len(live), row + len(rows)
        if count < size:
            raise not_enough(size, count)
        chosen: Array = np.concatenate(found)[:size].astype(np.intp)
        return chosen

    def weigh(self, slots: Array) -> Optional[Array]:
        return None

    def delivered(self, rows: Array) -> Optional[Array]:
        """These rows were handed out; none has to leave for it."""
        last = int(rows[-1])
        self.num_missed += last + 1 - self._next - len(rows)
        self._next = last + 1
        return None

    def published(self, slots: Array) -> None:
        pass

    def removed(self, slots: Array) -> None:
        pass

    def restored(self, slots: Array) -> None:
        pass

    def resizing(self) -> None:
        pass

    def resized(self, capacity: int, source: Array, target: Array) -> None:
        pass

    def cleared(self) -> None:
        """What comes now may have any numbers: a file's."""
        self._next = 0

    def _pass_over(self, num_rows: int) -> None:
        self._next += num_rows
        self.num_missed += num_rows

    def __deepcopy__(self, memo: Dict[int, Any]) -> Fifo:
        twin = memo[id(self)] = type(self)()
        twin._next, twin.num_missed = self._next, self.num_missed
        return twin
