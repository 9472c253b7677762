"""Sequences and episodes of a table: their indexes, kinds and uniform choices."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.metas.metas import MetaStore
from ding_store.buffer.samplers.base import Sampler, not_enough
from ding_store.buffer.samplers.choices import Choice
from ding_store.buffer.samplers.slot_set import SlotSet
from ding_store.buffer.samplers.uniform import Uniform
from ding_store.buffer.samplers.use_counts import UseCounts
from ding_store.buffer.sequences.breaks import Breaks
from ding_store.buffer.sequences.group_keys import GroupBy, GroupKeys
from ding_store.buffer.sequences.sequence_index import SequenceIndex
from ding_store.buffer.table.rows import RowIndex
from ding_store.buffer.table.table import Table

#: Slots -> a result for them, and which of them are valid. None means all.
Look = Callable[[Array], Tuple[Any, Optional[Array]]]
#: (slots, count, with replacement) -> so many of them.
Pick = Callable[[Array, int, bool], Array]

#: After so many draws that met invalid members, all members are checked.
ROUNDS = 4
#: The number of members that are checked at a time.
_CHUNK = 4096


class Sequences:
    """
    Overview:
        The sequence indexes of one table, one for each way to group rows. Each is created at its first use.
    """

    def __init__(self, table: Table, metas: MetaStore) -> None:
        self._table, self._metas = table, metas
        self.breaks = Breaks(table.table_dir)
        self._indexes: Dict[Tuple[Tuple[str, ...], Optional[str], bool], Tuple[SequenceIndex, GroupKeys]] = {}

    def index(self, groupby: Optional[GroupBy], done: Optional[str], metas_only: bool = False) -> SequenceIndex:
        """
        Overview:
            Return the index of rows by these groups, which end at ``done``. The first call reads all rows.
        Raises:
            - SchemaMismatch: There is no such column or meta, and the table is not empty.
        """
        names = (groupby,) if isinstance(groupby, str) else tuple(groupby or ())
        if not names and groupby is not None:
            raise TypeError('groupby must name a column or meta key, or several. Pass None for rows of one group.')
        known = self._indexes.get((names, done, metas_only))
        if known is None:
            with self._table.write_lock:
                known = self._indexes.setdefault((names, done, metas_only), self._make(names, done, metas_only))
        index, keys = known
        keys.resolve()
        with self._table.index.lock:
            state = keys.state()
            if state != keys.seen:
                index.forget()
                keys.seen = state
        if len(self._table):
            keys.check()
        return index

    def end(self, rows: Iterable[int], begin_episodes: bool = True) -> None:
        """
        Overview:
            End all sequences before these rows: none continues from an earlier row to one of them.
        Arguments:
            - begin_episodes (:obj:`bool`): Whether every episode begins anew with these rows.
        """
        with self._table.write_lock:
            if len(self._table):
                oldest = int(self._table.rows_by_age()[0])
                self.breaks.add([(row, begin_episodes) for row in rows], oldest)
                self.replaced()

    def places_of_breaks(self) -> List[int]:
        """
        Return the positions, in order of age, of rows that do not follow the row before them although it has their
        group.
        """
        with self._table.write_lock:
            rows = self._table.rows_by_age()
            do_follow = (np.diff(rows) == 1) & (np.diff(self.breaks.segments(rows)) == 0)
            places: List[int] = (np.flatnonzero(~do_follow) + 1).tolist()
            return places

    def replaced(self) -> None:
        """Read all rows again, because the table has other rows or other breaks."""
        with self._table.index.lock:
            for index, _ in self._indexes.values():
                index.replaced()

    def drop_columns(self) -> None:
        """Release the columns that were last read."""
        for _, keys in self._indexes.values():
            keys.drop_columns()

    def _make(self, names: Sequence[str], done: Optional[str], metas_only: bool) -> Tuple[SequenceIndex, GroupKeys]:
        keys = GroupKeys(self._table, self._metas, names, done, metas_only)
        keys.resolve()
        keys.seen = keys.state()
        with self._table.index.lock:
            read_done = keys.read_done if done is not None else None
            return SequenceIndex(self._table.index, keys.read, read_done, self.breaks), keys


class SequenceKind:
    """
    Overview:
        Sequences of ``length`` rows with one stride.
    Arguments:
        - stride (:obj:`int`): Start only at multiples of it, counted from the start of the run.
        - uses (:obj:`Optional[UseCounts]`): Limits how often a sequence may come. Counts belong to its first row.
    """

    def __init__(self, index: SequenceIndex, length: int, stride: int = 1, uses: Optional[UseCounts] = None) -> None:
        self.index, self.length, self.stride, self.uses = index, length, stride, uses

    def starts(self) -> SlotSet:
        """Return the slots of possible starts. Some may be invalid by now: see ``look``. The index must be locked."""
        self.index.refresh()
        return self.index.starts(self.length, self.stride, self.uses)

    def look(self, starts: Array) -> Tuple[Array, Optional[Array]]:
        """Return slots ``(length, B)``, and which starts have complete sequences that may come ``(B,)``. None: all."""
        windows, are_there = self.index.windows(starts, self.length)
        if self.uses is not None:
            are_left = ~self.uses.are_used_up(starts)
            if not are_left.all():
                are_there = are_left if are_there is None else are_there & are_left
        return windows, are_there

    def delivered(self, rows: Array) -> None:
        """Count the use of sequences with these rows ``(length, B)``."""
        if self.uses is not None:
            with self.index.rows.lock:
                slots, found = self.index.rows.find(self.uses.count(rows[0]))
                self.starts().discard(slots[found])

    def may_come(self, rows: Array) -> bool:
        """Return whether sequences of these live rows ``(length, B)``, which were chosen ahead, may still come."""
        if self.uses is None:
            return True
        with self.index.rows.lock:
            return self.uses.may_come(rows[0])


class SequenceChoice(Choice):
    """
    Overview:
        Chooses the slots of ``size`` sequences, step by step: ``(length * size,)``. Every start is equally likely,
        unless ``sampler`` draws the starts. O(length * size).
    """

    def __init__(
        self, kind: SequenceKind, uniform: Uniform, size: int, replace: bool = False, sampler: Optional[Sampler] = None
    ) -> None:
        super().__init__()
        self._kind, self._uniform, self._size, self._replace = kind, uniform, size, replace
        self._sampler = sampler

    def __call__(self, index: RowIndex) -> Array:
        if self._sampler is None:
            windows = self._draw(index)
        else:
            drawn, windows = self._sampler.draw_sequences(self._kind, self._size, self._replace)
            self.weights = self._sampler.weights(drawn)
        slots: Array = windows.reshape(-1).astype(np.intp, copy=False)
        return slots

    def _draw(self, index: RowIndex) -> Array:
        starts, pick = self._kind.starts(), pick_with(self._uniform, index)
        # Without replacement no start comes twice in a batch, and ``look`` refuses those that are used up.
        uses = self._kind.uses if self._replace else None
        what = f'sequences of {self._kind.length} steps'
        windows: Array = draw_valid(starts, self._kind.look, self._size, self._replace, pick, what, uses)
        return windows

    def may_deliver(self, rows: Array) -> bool:
        """Return whether sequences that were chosen ahead may still come."""
        return self._kind.may_come(rows.reshape(-1, self._size))


class EpisodeChoice:
    """
    Overview:
        Chooses the slots of ``size`` whole episodes, one after the other. Every episode is equally likely. O(rows
        chosen).
    """

    def __init__(
        self,
        index: SequenceIndex,
        uniform: Uniform,
        size: int,
        replace: bool = False,
        max_length: Optional[int] = None,
    ) -> None:
        self._index, self._uniform, self._size, self._replace = index, uniform, size, replace
        self._max_length = max_length
        #: The lengths of the last choice, ``(size,)``.
        self.lengths = np.empty(0, np.int64)

    def __call__(self, index: RowIndex) -> Array:
        self._index.refresh()
        ends = self._index.ends(self._max_length)
        pick = pick_with(self._uniform, index)
        slots, self.lengths = draw_valid(ends, self._look, self._size, self._replace, pick, 'whole episodes')
        chosen: Array = slots.T[np.arange(len(slots)) < self.lengths[:, None]].astype(np.intp)
        return chosen

    def _look(self, ends: Array) -> Tuple[Tuple[Array, Array], Optional[Array]]:
        slots, lengths, is_whole = self._index.episodes(ends)
        return (slots, lengths), is_whole


def pick_with(uniform: Uniform, index: RowIndex) -> Pick:
    """Return a function that draws from slots of this index."""
    return lambda members, size, replace: uniform.pick(members, size, replace, index.kernels)


def draw_valid(
    members: SlotSet, look: Look, size: int, replace: bool, pick: Pick, what: str, uses: Optional[UseCounts] = None
) -> Any:
    """
    Overview:
        Draw uniformly from the valid members of a set, within ``uses``. Invalid members that a draw meets leave the
        set.
    Returns:
        - looked: The result of ``look`` for the chosen members, ``(size,)``.
    Raises:
        - NotEnoughData: There are fewer than ``size`` valid members, or none with ``replace``.
    """

    def within_uses(chosen: Array) -> Array:
        if uses is None:
            return chosen
        return uses.within(
            chosen, lambda count: pick(members.members, count, True), lambda: members.members, members.discard
        )

    _check_enough(members, size, replace, what)
    chosen = within_uses(pick(members.members, size, replace))
    for _ in range(ROUNDS + 1):
        looked, is_valid = look(chosen)
        if is_valid is None and len(chosen) == size:
            return looked
        if is_valid is not None:
            members.discard(np.unique(chosen[~is_valid]))
            chosen = chosen[is_valid]
        _check_enough(members, size, replace, what)
        more = pick(members.members, size - len(chosen), replace)
        if not replace:
            # Drop repeats and draw again, which equals drawing without putting back.
            more = more[~np.isin(more, chosen)]
        chosen = within_uses(np.concatenate([chosen, more]))
    purge(members, look)
    _check_enough(members, size, replace, what)
    return look(within_uses(pick(members.members, size, replace)))[0]


def purge(members: SlotSet, look: Look) -> None:
    """Check all members, and discard the invalid ones."""
    everyone = members.members.copy()
    for start in range(0, len(everyone), _CHUNK):
        part = everyone[start : start + _CHUNK]
        _, is_valid = look(part)
        if is_valid is not None:
            members.discard(part[~is_valid])


def _check_enough(members: SlotSet, size: int, replace: bool, what: str) -> None:
    if len(members) < (1 if replace else size):
        raise not_enough(size, len(members), what)
