"""The rows that leave a full table for new ones, if these are not the oldest."""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, Optional

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.samplers.base import Sampler
from ding_store.buffer.samplers.heaps import HeapMasses
from ding_store.buffer.samplers.priorities import Priorities
from ding_store.buffer.table.rows import NO_ROWS, RowListener
from ding_store.buffer.table.table import Table
from ding_store.errors import ConfigError

REMOVERS = ('oldest', 'lowest_priority', 'reservoir')


class LowestPriority:
    """
    Overview:
        Removes the rows of the lowest priorities, the oldest first of equal ones. O(B log(capacity)).
    Arguments:
        - priorities (:obj:`Priorities`): The priorities of the table's rows.
    """

    def __init__(self, priorities: Priorities) -> None:
        self._priorities, self._masses = priorities, HeapMasses(1)
        priorities.follow(self._masses)

    def __call__(self, num_rows: int) -> Array:
        """Return the slots of so many rows that leave. The index is locked."""
        self._priorities.flush()
        return self._masses.order.least(num_rows)


class Reservoir(RowListener):
    """
    Overview:
        Keeps a uniform sample of all rows that were ever pushed (Vitter 1985, algorithm R). When the table of N rows is
        full, the t-th row takes the place of a random row with probability N / t, and is not stored otherwise. Rows
        that were deleted make room for the next ones.
    Arguments:
        - table (:obj:`Table`): A table without a path.
        - seed (:obj:`Optional[int]`): None draws from numpy's global generator.
    """

    def __init__(self, table: Table, seed: Optional[int] = None) -> None:
        self._table, self._index = table, table.index
        # Not the generator of a sampler with the same seed: its draws would depend on which rows were kept.
        self._random = np.random.mtrand._rand if seed is None else np.random.RandomState([seed, 1])
        #: The number of rows that were pushed since the table was empty, stored or not.
        self.num_seen = 0
        #: The rows that leave for those that are being added. None: any rows.
        self._leaving: Optional[Array] = None
        self._index.listen(self)

    def add(self, num_rows: int, add: Callable[[Array], Array]) -> Array:
        """
        Overview:
            Add those of new rows that are kept. Rows that are not stored have row numbers as well.
        Arguments:
            - add (:obj:`Callable`): Receives the places of at least one row, in order. Returns their row numbers.
        Returns:
            - rows (:obj:`np.ndarray`): Row numbers ``(num_rows,)``, int64. Those that are not stored come first.
        """
        table = self._table
        with table.write_lock:
            table.check_open()
            with self._index.lock:
                kept, first = self._choose(num_rows), table.next_row
                if len(kept) < num_rows:
                    self._index.promised_row = first + num_rows - len(kept)
            try:
                numbers = add(kept) if len(kept) else NO_ROWS
            finally:
                self._leaving = None
            self.num_seen += num_rows
        rows = np.empty(num_rows, np.int64)
        is_kept = np.zeros(num_rows, bool)
        is_kept[kept] = True
        rows[is_kept], rows[~is_kept] = numbers, np.arange(first, first + num_rows - len(kept))
        return rows

    def __call__(self, num_rows: int) -> Array:
        """Return the slots of so many rows that leave. The index is locked."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None and len(leaving) == num_rows:
            return self._index.find(leaving)[0].astype(np.intp)
        live = self._index.live_slots
        drawn: Array = live[self._random.permutation(len(live))[:num_rows]].astype(np.intp)
        return drawn

    def continue_from(self, other: Reservoir) -> None:
        """Continue with the count and the generator's state of another reservoir."""
        self.num_seen = other.num_seen
        if other._random is not np.random.mtrand._rand:
            self._random = copy.deepcopy(other._random)

    def cleared(self) -> None:
        self.num_seen = 0

    def loaded(self) -> None:
        """Count the rows before those of a file as pushed: row numbers continue those of the file."""
        self.num_seen = self._index.next_row

    def __deepcopy__(self, memo: Dict[int, Any]) -> None:
        """Return None: a reservoir belongs to one table."""

    def _choose(self, num_rows: int) -> Array:
        """Return the places of the new rows that are kept, and note which rows leave for them."""
        count, capacity = self._index.count, self._index.capacity
        num_free = min(capacity - count, num_rows)
        num_left = num_rows - num_free
        if not num_left:
            return np.arange(num_rows)
        drawn = (self._random.random_sample(num_left) * (self.num_seen + num_free + 1 + np.arange(num_left))).astype(
            np.int64
        )
        accepted = np.flatnonzero(drawn < capacity)[::-1]
        # A place in the reservoir keeps the last row that took it. The places from ``count`` on are of the first new
        # rows.
        places, last = np.unique(drawn[accepted], return_index=True)
        is_old = places < count
        self._leaving = self._index.row_of_slot[self._index.live_slots[places[is_old]]]
        first = np.delete(np.arange(num_free), places[~is_old] - count)
        return np.sort(np.concatenate([first, num_free + accepted[last]]))


def check_remover(remover: str, sampler: Sampler, path: Optional[str]) -> None:
    """
    Raises:
        - ConfigError: There is no such remover, or it cannot be used with this sampler or with a path.
    """
    if remover not in REMOVERS:
        raise ConfigError(f'remover ({remover!r}) must be one of {", ".join(map(repr, REMOVERS))}')
    if remover == 'reservoir' and path is not None:
        raise ConfigError(
            "remover ('reservoir') cannot be used with a path, because the files do not hold how many rows were "
            f'pushed: {path!r}. Leave out path, or choose another remover.'
        )
    priorities = sampler.priorities
    if remover == 'lowest_priority' and not (isinstance(priorities, Priorities) and priorities.masses.has_new_rows):
        raise ConfigError(
            "remover ('lowest_priority') needs a sampler with a priority for each row, such as Prioritized() or "
            f'MaxHeap(), not {type(sampler).__name__}. Pass one as sampler, or choose another remover.'
        )


def remove_lowest(table: Table, sampler: Sampler) -> None:
    """Let the rows of the lowest priorities leave a full table first. See ``check_remover``."""
    priorities = sampler.priorities
    assert isinstance(priorities, Priorities)
    table.index.remover = LowestPriority(priorities)
