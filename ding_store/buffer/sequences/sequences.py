"""Sequences and episodes of a table: what a sample of them is made of."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import numpy as np

from ding_store.buffer.arrays import Array
from ding_store.buffer.elements.metas import MetaStore
from ding_store.buffer.sampling.samplers import not_enough
from ding_store.buffer.sampling.slot_set import SlotSet
from ding_store.buffer.sequences.group_keys import GroupBy, GroupKeys
from ding_store.buffer.sequences.sequence_index import SequenceIndex
from ding_store.buffer.sequences.unrolled import StepReader
from ding_store.buffer.table.choices import Draw
from ding_store.buffer.table.rows import RowIndex
from ding_store.buffer.table.table import Table
from ding_store.columns import Schema

#: Slots -> whatever is to be known of them, and which of them will do.
Look = Callable[[Array], Tuple[Any, Array]]

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
        with self._table.index.lock:
            if keys.has_changed():
                index.forget()
        if len(self._table):
            keys.check()
        return index

    def step_reader(self, schema: Schema) -> StepReader:
        """How rows of this schema that are sequences are read step by step."""
        reader = self._reader
        if reader is None or reader.schema is not schema:
            reader = self._reader = StepReader(schema)
        return reader

    def drop_reader(self) -> None:
        """It has the columns that it last read."""
        self._reader = None

    def _make(self, names: Sequence[str], done: Optional[str], metas_only: bool) -> Tuple[SequenceIndex, GroupKeys]:
        keys = GroupKeys(self._table, self._metas, names, done, metas_only)
        keys.has_changed()
        with self._table.index.lock:
            return SequenceIndex(self._table.index, keys.read, keys.read_done if done is not None else None), keys


class SequenceChoice:
    """
    Overview:
        Slots of ``size`` sequences of ``length`` rows, step by step: ``(length * size,)``. Every start is equally
        likely; O(length * size).
    Arguments:
        - stride (:obj:`int`): Sequences start at multiples of it, counted from where their episode began.
    """

    def __init__(
        self, index: SequenceIndex, draw: Draw, size: int, length: int, stride: int = 1, replace: bool = False
    ) -> None:
        self._index, self._draw, self._size, self._replace = index, draw, size, replace
        self._length, self._stride = length, stride

    def __call__(self, index: RowIndex) -> Array:
        self._index.refresh()
        starts = self._index.starts(self._length, self._stride)
        what = f'sequences of {self._length} steps'
        _, windows = draw_valid(starts, self._look, self._size, self._replace, self._draw, what)
        slots: Array = windows.reshape(-1).astype(np.intp, copy=False)
        return slots

    def _look(self, starts: Array) -> Tuple[Array, Array]:
        return self._index.windows(starts, self._length)


class EpisodeChoice:
    """
    Overview:
        Slots of ``size`` whole episodes, one after the other; every episode is equally likely. O(rows chosen).
    """

    def __init__(
        self, index: SequenceIndex, draw: Draw, size: int, replace: bool = False, max_length: Optional[int] = None
    ) -> None:
        self._index, self._draw, self._size, self._replace = index, draw, size, replace
        self._max_length = max_length
        #: Of the last choice, ``(size,)``.
        self.lengths = np.empty(0, np.int64)

    def __call__(self, index: RowIndex) -> Array:
        self._index.refresh()
        ends = self._index.ends(self._max_length)
        _, (slots, self.lengths) = draw_valid(ends, self._look, self._size, self._replace, self._draw, 'whole episodes')
        chosen: Array = slots.T[np.arange(len(slots)) < self.lengths[:, None]].astype(np.intp)
        return chosen

    def _look(self, ends: Array) -> Tuple[Tuple[Array, Array], Array]:
        slots, lengths, is_whole = self._index.episodes(ends)
        return (slots, lengths), is_whole


def draw_valid(members: SlotSet, look: Look, size: int, replace: bool, draw: Draw, what: str) -> Tuple[Array, Any]:
    """
    Overview:
        Uniform draws among those members of a set that are valid; invalid ones go from it as they are met.
    Returns:
        - chosen (:obj:`np.ndarray`): Slots ``(size,)``.
        - looked: What ``look`` gave for them.
    Raises:
        - NotEnoughData: There are fewer valid members than that, or with ``replace`` none.
    """
    _check_enough(members, size, replace, what)
    chosen = members.members[draw(len(members), size, replace)]
    looked, is_valid = look(chosen)
    if is_valid.all():
        return chosen, looked
    for _ in range(ROUNDS):
        members.discard(np.unique(chosen[~is_valid]))
        kept = chosen[is_valid]
        _check_enough(members, size, replace, what)
        more = members.members[draw(len(members), size - len(kept), replace)]
        if not replace:
            # Drawn before: drawn again, as if nothing were put back.
            more = more[~np.isin(more, kept)]
        chosen = np.concatenate([kept, more])
        looked, is_valid = look(chosen)
        if len(chosen) == size and is_valid.all():
            return chosen, looked
    purge(members, look)
    _check_enough(members, size, replace, what)
    chosen = members.members[draw(len(members), size, replace)]
    return chosen, look(chosen)[0]


def purge(members: SlotSet, look: Look) -> None:
    """Look at all members, and discard those that are not valid."""
    everyone = members.members.copy()
    for start in range(0, len(everyone), _CHUNK):
        part = everyone[start : start + _CHUNK]
        members.discard(part[~look(part)[1]])


def _check_enough(members: SlotSet, size: int, replace: bool, what: str) -> None:
    if len(members) < (1 if replace else size):
        raise not_enough(size, len(members), what)
