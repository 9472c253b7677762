"""The keys that assign rows to groups: an integer column, a meta key, or several of these."""

from __future__ import annotations

from math import prod
from typing import List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.metas.groups import Groups
from ding_store.buffer.metas.metas import MetaStore
from ding_store.buffer.table.encodings import Column
from ding_store.buffer.table.table import Table
from ding_store.errors import SchemaMismatch

#: A column or meta key, or several of them. Rows of a group are equal in all.
GroupBy = Union[str, Sequence[str]]


class GroupKeys:
    """
    Overview:
        Reads the group of any row, and notices if live rows change theirs.
    Arguments:
        - names (:obj:`Sequence[str]`): Columns of integers, or otherwise meta keys. No name: all rows are one group.
        - done (:obj:`Optional[str]`): The column that is true in an episode's last row.
        - metas_only (:obj:`bool`): Look up every name in the metas, even if a column has that name.
    """

    def __init__(
        self, table: Table, metas: MetaStore, names: Sequence[str], done: Optional[str], metas_only: bool
    ) -> None:
        self._table, self._metas, self._names, self._done = table, metas, names, done
        self._metas_only = metas_only
        self._sources: List[Union[str, Groups]] = []
        #: The last ``state`` that the index was built for.
        self.seen: Tuple[object, ...] = ()
        #: The columns of the table that ``resolve`` and ``check`` have seen. If all groups come from columns, neither
        #: does anything while the table has the same ones.
        self._resolved: Optional[Mapping[str, Column]] = None
        self._checked: Optional[Mapping[str, Column]] = None

    def resolve(self) -> None:
        """Find the columns and metas of the groups. Call it before the others, without the table's index locked."""
        columns = self._table.columns.current
        if columns is not self._resolved:
            self._sources = [self._source(name) for name in self._names]
            for name in (*self._names, *((self._done,) if self._done else ())):
                self._table.columns.num_changes.setdefault(name, 0)
            self._resolved = None if any(isinstance(source, Groups) for source in self._sources) else columns

    def drop_columns(self) -> None:
        """Release the columns that were last seen."""
        self._resolved = self._checked = None

    def state(self) -> Tuple[object, ...]:
        """Return a state that differs if live rows may have changed their groups or dones."""
        return tuple(
            (id(source), source.num_moves) if isinstance(source, Groups) else self._table.columns.num_changes[source]
            for source in (*self._sources, *((self._done,) if self._done else ()))
        )

    def read(self, slots: Array) -> Tuple[Array, Array]:
        """Return each slot's group value, ``(n,)`` or ``(n, k)``, int64, and which slots have a group."""
        if not self._sources:
            return np.zeros(len(slots), np.int64), np.ones(len(slots), bool)
        values = [self._read(source, slots) for source in self._sources]
        has_group = np.ones(len(slots), bool)
        for source, each in zip(self._sources, values):
            if isinstance(source, Groups):
                has_group &= each != Groups.NONE
        return values[0] if len(values) == 1 else np.stack(values, axis=1), has_group

    def read_done(self, slots: Array) -> Array:
        """Return which of these rows end an episode."""
        column = self._table.columns.get(self._done or '')
        # A table without columns has no rows.
        return np.zeros(len(slots), bool) if column is None else column.read(slots).reshape(len(slots)) != 0

    def check(self) -> None:
        """
        Raises:
            - SchemaMismatch: There is no such column or meta, or the column does not hold one number per row.
        """
        columns = self._table.columns.current
        if columns is self._checked:
            return
        if self._done is not None and (self._done not in columns or prod(columns[self._done].shape) != 1):
            raise SchemaMismatch(
                f'done ({self._done!r}) must be a column with one number per row, one of {sorted(columns)}. '
                'Pass done=None for rows without ends.'
            )
        for name, source in zip(self._names, self._sources):
            if isinstance(source, Groups):
                if not self._metas_only and not source.is_used:
                    raise SchemaMismatch(
                        f'groupby ({name!r}) is neither a column ({sorted(columns)}) nor a key of the metas'
                    )
            elif name in columns and (prod(columns[name].shape) != 1 or columns[name].dtype.kind not in 'biu'):
                column = columns[name]
                raise SchemaMismatch(
                    f'groupby ({name!r}) must be a column with one integer per row, but has {column.dtype} of shape '
                    f'{column.shape}'
                )
        # The table may have other columns by now, which must be checked again.
        self._checked = columns if columns is self._resolved else None

    def _source(self, name: str) -> Union[str, Groups]:
        if not self._metas_only and name in self._table.columns:
            return name
        groups = self._metas.known_groups(name)
        if groups is None:
            with self._table.write_lock:
                groups = self._metas.groups(name)
        return groups

    def _read(self, source: Union[str, Groups], slots: Array) -> Array:
        if isinstance(source, Groups):
            return source.codes[slots]
        column = self._table.columns.get(source)
        if column is None or column.dtype.kind not in 'biu' or prod(column.shape) != 1:
            return np.zeros(len(slots), np.int64)  # ``check`` refuses this column.
        return column.read(slots).reshape(len(slots)).astype(np.int64)
