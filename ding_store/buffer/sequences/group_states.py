"""The state of each group of rows: the end of its line, and the length of its current run."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import PAGE
from ding_store.buffer.sequences.linked_pages import NOWHERE

#: Groups without rows are kept up to this number, or up to the number of other groups. Episodes come and go, but an
#: environment's steps may continue after all its earlier ones have left.
_MAX_IDLE = 4096


class Rows(NamedTuple):
    """Facts about new rows, one array each."""

    places: Array
    positions: Array  # The place in the run, from 1.
    is_known: Array  # True if the run began where an episode did.
    is_done: Array
    missed: Array
    segments: Array

    def at(self, which: Array) -> Rows:
        return Rows(*(array[which] for array in self))


class GroupStates:
    """
    Overview:
        Arrays by group number:

        * ``tails``: the last place of the group's line.
        * ``runs``: the number of rows in its current run, including rows that left. 0 after a done.
        * ``is_known``: True if that run began where an episode did.
        * ``missed``: the count of gaps in the rows of all groups when its last row came.
        * ``segments``: the number of breaks before its last row. See ``Breaks``.
        * ``num_rows``: the number of its rows that hold a slot.
    """

    def __init__(self) -> None:
        self._id_of: Dict[Any, int] = {}
        self._free: List[int] = []
        self.tails, self.runs = np.empty(0, np.int64), np.empty(0, np.int64)
        self.num_rows, self.missed = np.empty(0, np.int64), np.empty(0, np.int64)
        self.segments = np.empty(0, np.int64)
        self.is_known = np.empty(0, bool)

    def __len__(self) -> int:
        return len(self._id_of)

    def ids(self, values: Array) -> Array:
        """Return group numbers ``(n,)`` of values ``(n,)`` or ``(n, k)``."""
        distinct, inverse = np.unique(values, axis=0 if values.ndim > 1 else None, return_inverse=True)
        if len(self._free) < len(distinct):
            self._make_room(len(distinct))
        keys = distinct.tolist() if values.ndim == 1 else list(map(tuple, distinct.tolist()))
        ids = np.array([self._id(key) for key in keys], np.int64)
        each: Array = ids[inverse.reshape(-1)]
        return each

    def advance(self, ids: Array, counts: Array, lasts: Rows) -> None:
        """Add ``counts`` rows to these distinct groups. ``lasts`` are the last new rows of each."""
        self.tails[ids] = lasts.places
        self.num_rows[ids] += counts
        self.runs[ids] = np.where(lasts.is_done, 0, lasts.positions)
        self.is_known[ids] = lasts.is_known | lasts.is_done
        self.missed[ids], self.segments[ids] = lasts.missed, lasts.segments

    def count_down(self, ids: Array) -> None:
        """Subtract one row of a group for each time that it is listed."""
        np.subtract.at(self.num_rows, ids, 1)

    def lose_tails(self, ids: Array, pages: Array) -> None:
        """Reset the tails on these pages, which these groups released."""
        is_tail = self.tails[ids] // PAGE == pages
        self.tails[ids[is_tail]] = NOWHERE

    def _id(self, key: Any) -> int:
        found = self._id_of.get(key)
        if found is None:
            found = self._id_of[key] = self._free.pop()
            self.tails[found] = NOWHERE
            self.runs[found] = self.num_rows[found] = self.missed[found] = self.segments[found] = 0
            # If rows were missed before the group's first row, that row's ``missed`` differs from this 0 and breaks the
            # run.
            self.is_known[found] = True
        return found

    def _make_room(self, num_new: int) -> None:
        idle = [(key, i) for key, i in self._id_of.items() if self.num_rows[i] == 0]
        if len(idle) > max(_MAX_IDLE, len(self._id_of) // 2):
            # Drop the oldest ones. If one of them comes back later, it counts as new.
            for key, i in idle[: len(idle) // 2]:
                del self._id_of[key]
                self._free.append(i)
        if len(self._free) < num_new:
            self._grow(max(num_new, len(self.tails), 16))

    def _grow(self, num_more: int) -> None:
        known = len(self.tails)
        self._free += range(known + num_more - 1, known - 1, -1)
        fill = np.zeros(num_more, np.int64)
        self.tails = np.concatenate([self.tails, fill + NOWHERE])
        self.runs, self.num_rows = np.concatenate([self.runs, fill]), np.concatenate([self.num_rows, fill])
        self.missed, self.segments = np.concatenate([self.missed, fill]), np.concatenate([self.segments, fill])
        self.is_known = np.concatenate([self.is_known, fill.astype(bool)])
