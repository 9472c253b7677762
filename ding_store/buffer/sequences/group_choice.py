"""Samples of groups for DI-engine's ``groupby`` that do not read all rows."""

from __future__ import annotations

from typing import Callable, List, Optional

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.metas.groups import Groups
from ding_store.buffer.samplers.base import not_enough
from ding_store.buffer.sequences.sequence_index import SequenceIndex
from ding_store.buffer.table.rows import RowIndex


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


#: Receives the number of items, how many to draw, and whether with replacement. Returns positions.
Draw = Callable[[int, int, bool], Array]

#: The number of steps of a uniform draw in [0, 1).
_FINE = 1 << 52


class GroupChoice:
    """
    Overview:
        A choice of rows of groups: whole groups, or ``unroll_len`` consecutive rows of each. Every group is equally
        likely, and within a group every start. O(rows) per choice.
    Arguments:
        - groups (:obj:`Groups`): Maps rows to groups.
        - draw (:obj:`Draw`): Draws groups and starts.
        - size (:obj:`int`): The number of groups.
        - unroll_len (:obj:`Optional[int]`): Groups with fewer rows are left out. None chooses whole groups.
        - sliced (:obj:`bool`): If true, starts are multiples of ``unroll_len``, and the last slice ends with the group.
    Raises (when called):
        - NotEnoughData: There are fewer groups than ``size``.
    """

    def __init__(
        self,
        groups: Groups,
        draw: Draw,
        size: int,
        replace: bool = False,
        unroll_len: Optional[int] = None,
        sliced: bool = False,
        sample_range: Optional[slice] = None,
    ) -> None:
        self._groups, self._draw, self._size, self._replace = groups, draw, size, replace
        self._unroll_len, self._sliced, self._range = unroll_len, sliced, sample_range
        #: Number of rows per group in the last choice.
        self.lengths: List[int] = []

    def __call__(self, index: RowIndex) -> Array:
        slots = index.slots_by_age()[self._range or slice(None)].astype(np.intp)
        slots = slots[self._groups.codes[slots] != Groups.NONE]
        codes = self._groups.codes[slots]
        chosen = self._choose_groups(codes)
        # Loop only over the rows of the chosen groups.
        slots = slots[np.isin(codes, chosen)]
        codes = self._groups.codes[slots]
        parts = [self._part_of(slots[codes == code]) for code in chosen.tolist()]
        self.lengths = [len(part) for part in parts]
        return np.concatenate(parts)

    def _choose_groups(self, codes: Array) -> Array:
        names, counts = np.unique(codes, return_counts=True)
        eligible = names[counts >= (self._unroll_len or 1)]
        if len(eligible) < (1 if self._replace else self._size):
            raise not_enough(self._size, len(eligible), 'records/groups')
        return eligible[self._draw(len(eligible), self._size, self._replace)]

    def _part_of(self, slots: Array) -> Array:
        length = self._unroll_len
        if length is None:
            return slots
        start = self._start(len(slots), length)
        return slots[start : start + length]

    def _start(self, num_rows: int, length: int) -> int:
        if not self._sliced:
            return int(self._draw(num_rows - length + 1, 1, True)[0])
        start = int(self._draw(num_rows, 1, True)[0]) // length * length
        return min(start, num_rows - length)


class IndexedGroupChoice:
    """
    Overview:
        A GroupChoice in O(groups + rows chosen). Every group is equally likely, and within a group every start. If a
        deleted row leaves a gap, GroupChoice chooses until all older rows have left, because only it skips gaps.
    Arguments:
        - index (:obj:`SequenceIndex`): The index of these groups, without dones.
        - otherwise (:obj:`GroupChoice`): A choice of the same groups with the same arguments.
    """

    def __init__(
        self,
        index: SequenceIndex,
        otherwise: GroupChoice,
        draw: Draw,
        size: int,
        replace: bool,
        unroll_len: Optional[int],
        sliced: bool,
    ) -> None:
        self._index, self._otherwise, self._draw = index, otherwise, draw
        self._size, self._replace, self._unroll_len, self._sliced = size, replace, unroll_len, sliced
        #: The number of rows of each group in the last choice.
        self.lengths: List[int] = []

    def __call__(self, index: RowIndex) -> Array:
        self._index.refresh()
        slots = self._chosen() if _has_no_holes(index) else None
        if slots is None:
            slots = self._otherwise(index)
            self.lengths = self._otherwise.lengths
        return slots

    def _chosen(self) -> Optional[Array]:
        """Choose slots. Return None if a writer is deleting some of these rows."""
        groups, lines = self._index.groups, self._index.lines
        eligible = np.flatnonzero(groups.num_rows >= (self._unroll_len or 1))
        if len(eligible) < (1 if self._replace else self._size):
            raise not_enough(self._size, len(eligible), 'records/groups')
        chosen = eligible[self._draw(len(eligible), self._size, self._replace)]
        counts = groups.num_rows[chosen]
        lengths = counts if self._unroll_len is None else np.full(self._size, self._unroll_len)
        starts = lines.back(chosen, groups.tails[chosen], counts - 1 - self._starts(counts))
        slots, are_there = self._index.windows_from(starts, lengths)
        if not are_there.all():
            return None
        self.lengths = lengths.tolist()
        return slots.T[np.arange(len(slots)) < lengths[:, None]].astype(np.intp)

    def _starts(self, counts: Array) -> Array:
        length = self._unroll_len
        if length is None:
            return np.zeros(self._size, np.int64)
        share = self._draw(_FINE, self._size, True) / _FINE
        if not self._sliced:
            return (share * (counts - length + 1)).astype(np.int64)
        return np.minimum((share * counts).astype(np.int64) // length * length, counts - length)


def _has_no_holes(index: RowIndex) -> bool:
    if not index.count:
        return True
    oldest = index.row_of_slot[index.slots_by_age()[0]]
    return bool(index.next_row - oldest == index.count)
