"""Sequences and episodes of a table: what a sample of them is made of."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.metas import MetaStore
from ding_store.buffer.sampling.samplers import Uniform, not_enough
from ding_store.buffer.sampling.slot_set import SlotSet
from ding_store.buffer.sampling.use_counts import UseCounts
from ding_store.buffer.sequences.breaks import Breaks
from ding_store.buffer.sequences.group_keys import GroupBy, GroupKeys
from ding_store.buffer.sequences.sequence_index import SequenceIndex
from ding_store.buffer.sequences.unrolled import StepReader
from ding_store.buffer.table.rows import RowIndex
from ding_store.buffer.table.table import Table
from ding_store.columns import Schema

#: Slots -> whatever is to be known of them, and which of them will do; None: all.
Look = Callable[[Array], Tuple[Any, Optional[Array]]]
#: (slots, how many, with replacement) -> so many of them.
Pick = Callable[[Array, int, bool], Array]

#: After so many draws that met rows that had left, all are looked at.
ROUNDS = 4
#: Members of a set that are looked at together then.
_CHUNK = 4096


class Sequences:
    """
    Overview:
        The sequence indexes of one table, made when they are first asked for: one for each way to group rows.
    """

    def __init__(self, table: Table, metas: MetaStore) -> None:
        self._table, self._metas = table, metas
        self.breaks = Breaks(table.table_dir)
        self._reader: Optional[StepReader] = None
        self._indexes: Dict[Tuple[Tuple[str, ...], Optional[str], bool], Tuple[SequenceIndex, GroupKeys]] = {}

    def index(self, groupby: Optional[GroupBy], done: Optional[str], metas_only: bool = False) -> SequenceIndex:
        """
        Overview:
            The index of rows by these groups, which end at ``done``; the first call looks at all rows.
        Raises:
            - SchemaMismatch: There is no such column or meta; not for an empty table.
        """
        names = (groupby,) if isinstance(groupby, str) else tuple(groupby or ())
        if not names and groupby is not None:
            raise TypeError('groupby must name a column or meta key, or several; None is for rows of one group')
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

    def replaced(self) -> None:
        """The table has other rows, or other breaks: look at all of them again."""
        with self._table.index.lock:
            for index, _ in self._indexes.values():
                index.replaced()

    def step_reader(self, schema: Schema) -> StepReader:
        """How rows of this schema that are sequences are read step by step."""
        reader = self._reader
        if reader is None or reader.schema is not schema:
            reader = self._reader = StepReader(schema)
        return reader

    def drop_columns(self) -> None:
        """Let go of the columns that were last read."""
        self._reader = None
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
        Sequences of ``length`` rows.
    Arguments:
        - stride (:obj:`int`): They start at multiples of it, counted from where their episode began.
        - uses (:obj:`Optional[UseCounts]`): How often each may come, counted by the row that it starts at.
    """

    def __init__(self, index: SequenceIndex, length: int, stride: int = 1, uses: Optional[UseCounts] = None) -> None:
        self.index, self.length, self.stride, self.uses = index, length, stride, uses

    def starts(self) -> SlotSet:
        """Slots at which they start; some may do so no longer: see ``look``. Called with the table's index locked."""
        self.index.refresh()
        return self.index.starts(self.length, self.stride, self.uses)

    def look(self, starts: Array) -> Tuple[Array, Optional[Array]]:
        """Slots ``(length, B)``, and which of them are sequences that may come ``(B,)``; None: all."""
        windows, are_there = self.index.windows(starts, self.length)
        if self.uses is not None:
            are_left = ~self.uses.are_used_up(starts)
            if not are_left.all():
                are_there = are_left if are_there is None else are_there & are_left
        return windows, are_there

    def delivered(self, rows: Array) -> None:
        """Sequences of these rows ``(length, B)`` were handed out."""
        if self.uses is not None:
            with self.index.rows.lock:
                slots, found = self.index.rows.find(self.uses.count(rows[0]))
                self.starts().discard(slots[found])

    def may_come(self, rows: Array) -> bool:
        """Whether sequences of these rows ``(length, B)``, which are there and were chosen before, may come still."""
        if self.uses is None:
            return True
        with self.index.rows.lock:
            return self.uses.may_come(rows[0])


class SequenceChoice:
    """
    Overview:
        Slots of ``size`` sequences of a kind, step by step: ``(length * size,)``. Every start is equally likely;
        O(length * size).
    """

    def __init__(self, kind: SequenceKind, uniform: Uniform, size: int, replace: bool = False) -> None:
        self._kind, self._uniform, self._size, self._replace = kind, uniform, size, replace

    def __call__(self, index: RowIndex) -> Array:
        starts, pick = self._kind.starts(), pick_with(self._uniform, index)
        # Without replacement nothing comes twice in a batch, and what is used up is no valid start.
        uses = self._kind.uses if self._replace else None
        what = f'sequences of {self._kind.length} steps'
        windows = draw_valid(starts, self._kind.look, self._size, self._replace, pick, what, uses)
        slots: Array = windows.reshape(-1).astype(np.intp, copy=False)
        return slots

    def may_come(self, rows: Array) -> bool:
        """Whether what was chosen ahead may come still."""
        return self._kind.may_come(rows.reshape(-1, self._size))


class EpisodeChoice:
    """
    Overview:
        Slots of ``size`` whole episodes, one after the other; every episode is equally likely. O(rows chosen).
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
        #: Of the last choice, ``(size,)``.
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
    """What draws from the slots of this index."""
    return lambda members, size, replace: uniform.pick(members, size, replace, index.kernels)


def draw_valid(
    members: SlotSet, look: Look, size: int, replace: bool, pick: Pick, what: str, uses: Optional[UseCounts] = None
) -> Any:
    """
    Overview:
        Uniform draws among those members of a set that are valid, and within ``uses``; invalid ones go from it as they
        are met.
    Returns:
        - looked: What ``look`` gave for the chosen ones, ``(size,)``.
    Raises:
        - NotEnoughData: There are fewer valid members than that, or with ``replace`` none.
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
            # Drawn before: drawn again, as if nothing were put back.
            more = more[~np.isin(more, chosen)]
        chosen = within_uses(np.concatenate([chosen, more]))
    purge(members, look)
    _check_enough(members, size, replace, what)
    return look(within_uses(pick(members.members, size, replace)))[0]


def purge(members: SlotSet, look: Look) -> None:
    """Look at all members, and discard those that are not valid."""
    everyone = members.members.copy()
    for start in range(0, len(everyone), _CHUNK):
        part = everyone[start : start + _CHUNK]
        _, is_valid = look(part)
        if is_valid is not None:
            members.discard(part[~is_valid])


def _check_enough(members: SlotSet, size: int, replace: bool, what: str) -> None:
    if len(members) < (1 if replace else size):
        raise not_enough(size, len(members), what)
