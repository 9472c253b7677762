"""The runs of rows that a draw of groups can return: whole groups, or consecutive rows of one group."""

from __future__ import annotations

from typing import Optional

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.metas.groups import Groups


class GroupRuns:
    """
    Overview:
        Maps each row to a run. The run is the row's whole group, or the ``unroll_len`` rows that begin with the row.
        With ``sliced`` it is the slice that holds the row, as GroupChoice cuts slices. O(rows).
    Members:
        - slots (:obj:`np.ndarray`): The slots of rows that have a run, ``(n,)``.
        - run_of_slot (:obj:`np.ndarray`): The run of each of them, ``(n,)``. Runs are numbered from 0 without gaps.
    """

    def __init__(self, groups: Groups, slots: Array, unroll_len: Optional[int], sliced: bool) -> None:
        """
        Arguments:
            - slots (:obj:`np.ndarray`): The slots of all rows, by age.
        """
        slots = slots[groups.codes[slots] != Groups.NONE]
        codes = groups.codes[slots]
        order = np.argsort(codes, kind='stable')
        #: The slots by group, and within a group by age.
        self._ordered = slots[order]
        begins = np.flatnonzero(np.diff(codes[order], prepend=-1))
        counts = np.diff(begins, append=len(slots))
        begin, count = np.repeat(begins, counts), np.repeat(counts, counts)
        place = np.arange(len(slots)) - begin
        if unroll_len is None:
            first, length = begin, count
        else:
            length = np.full(len(slots), unroll_len)
            first = begin + (np.minimum(place // length * length, count - length) if sliced else place)
        is_whole = (length <= count) & (first + length <= begin + count)
        self.slots = self._ordered[is_whole]
        self._firsts, at, self.run_of_slot = np.unique(first[is_whole], return_index=True, return_inverse=True)
        self._lengths = length[is_whole][at]

    def slots_of(self, run: int) -> Array:
        """Return the slots of a run, by age."""
        first = self._firsts[run]
        rows: Array = self._ordered[first : first + self._lengths[run]]
        return rows
