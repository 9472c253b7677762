"""The part of a table that changes what there is room for: other columns, wider ones, more or fewer slots."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any, Callable, Collection, FrozenSet, Iterable, List, Mapping, Optional, Tuple

import numpy as np

from ding_store.buffer.arguments import integer
from ding_store.buffer.array_types import Array, filled
from ding_store.buffer.interrupts import finish
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.table.column_memory import ColumnMemory, ColumnSpec
from ding_store.buffer.table.narrowing import narrowed_columns, stored_specs, widen, widened
from ding_store.buffer.table.rows import NO_ROWS
from ding_store.buffer.table.table_base import Columns, TableBase, checked_specs, stored_columns
from ding_store.errors import ConfigError

logger = logging.getLogger(__name__)

#: (slots whose rows have to move, where they will live) -> what is called when they do.
Moving = Callable[[Array, Array], Callable[[], None]]


def _copy(values: Array, out: Array) -> None:
    out[...] = values


class TableShape(TableBase):
    """See ``Table``."""

    def as_stored(self, columns: Mapping[str, Any], narrowed: Collection[str] = ()) -> Columns:
        """
        Overview:
            These columns as they are kept. What was kept as bytes and cannot be any longer is widened first, and stays
            so. The caller has the lock of the writers, and is done with them before this thread calls again.
        Arguments:
            - columns (:obj:`Mapping`): Name -> array ``(n, *shape)``; of ``narrow`` ones also the list of
              ``Schema.encode_parts``.
            - narrowed (:obj:`Collection[str]`): Names of those that are bytes already.
        Raises:
            - NotEnoughSpace: There is no room for what is widened; nothing changed.
        """
        if not self._narrow and not narrowed:
            return columns
        stored = dict(columns)
        for name, values in narrowed_columns(columns, self._narrow.intersection(columns).difference(narrowed)).items():
            if values is None:
                self._widen(name)
                values = np.asarray(columns[name])
            stored[name] = values.reshape(-1, *self.columns[name].shape[1:])
        for name in set(narrowed) - self._narrow:
            stored[name] = widened(columns[name])
        return stored

    def clear(self) -> None:
        """Take all rows out, or none if it is killed. Row numbers are not used again."""
        with self.write_lock, self.index.lock:
            self.check_open()
            finish(self._clear)

    def _clear(self) -> None:
        self._change()
        if self.table_dir is not None:
            self.table_dir.clear()
        self.index.clear()
        self._sync_numbers()

    def add_columns(
        self,
        columns: Mapping[str, ColumnSpec],
        fill: Optional[Mapping[str, Any]] = None,
        info: Any = None,
        added: Callable[[], None] = lambda: None,
        wider: Optional[Mapping[str, ColumnSpec]] = None,
    ) -> None:
        """
        Overview:
            Widen the schema. Rows that are there get ``fill[name]``, or zeros.
        Arguments:
            - added (:obj:`Callable`): Called when the columns are there; again if an exception interrupts it.
            - wider (:obj:`Optional[Mapping]`): Columns that the table has -> dtypes that hold all their values, which
              they have from now on. Readers find these and what ``added`` changes at once, or wait.
        Raises:
            - ConfigError: The table has a column of this name.
            - NotEnoughSpace: There is no room for it; nothing changed.
        """
        specs, wider_specs = checked_specs(columns), checked_specs(wider or {})
        with self.write_lock:
            self.check_open()
            doubled = sorted(set(specs) & set(self.columns))
            if doubled:
                raise ConfigError(f'the table has the columns {doubled} already')
            done: List[bool] = []

            def add() -> None:
                missing = {name: spec for name, spec in specs.items() if name not in self.columns}
                self._regions.add(missing, self._num_used)
                for name, value in (fill or {}).items():
                    self.columns[name][: self._num_used] = value
                narrow = {name: spec for name, spec in wider_specs.items() if self.specs[name] != spec}
                replaces = [self._regions.replacing(name, spec, _copy, self._num_used) for name, spec in narrow.items()]
                with self.index.lock if wider_specs else nullcontext():
                    if replaces:
                        # Readers that have an old column do it again.
                        self._num_updates += 1
                    for replace in replaces:
                        replace()
                    self._describe(info)
                    added()
                done[:] = [True]

            try:
                finish(add)
            except BaseException:
                if not done:
                    self._regions.take_back(specs)
                raise

    def replace_columns(
        self,
        columns: Mapping[str, ColumnSpec],
        info: Any = None,
        narrow_columns: Iterable[str] = (),
        replaced: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Overview:
            Take all rows out, and have these columns from now on instead, some of them kept as bytes for as long as
            that is exact. Row numbers go on growing. ``replaced`` is as of ``replace``.
        """
        names = frozenset(narrow_columns)
        with self.write_lock:
            regions = self.new_regions()
            regions.add(stored_specs(checked_specs(columns), names))
            self.replace(regions, info, names, replaced=replaced)

    def new_regions(self) -> ColumnMemory:
        """Columns beside these, for ``replace``. The caller has the lock of the writers until then."""
        self.check_open()
        return ColumnMemory(self.capacity, self.table_dir)

    def replace(
        self,
        regions: ColumnMemory,
        info: Any,
        narrow_columns: Iterable[str],
        rows: Array = NO_ROWS,
        next_row: int = 0,
        metas: Iterable[bytes] = (),
        cleared: Callable[[], None] = lambda: None,
        replaced: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Overview:
            Take all rows out, and have these columns from now on instead, with the rows that are in their first slots.
            What can fail does before anything changes. A kill leaves the table as it was, or as it will be.
        Arguments:
            - rows (:obj:`np.ndarray`): Their row numbers, oldest first; they may have been those of others.
            - next_row (:obj:`int`): The row number that the next row has at least.
            - metas (:obj:`Iterable[bytes]`): Records of their metas.
            - cleared (:obj:`Callable`): Called when the old rows are gone, before any of the new ones is there.
            - replaced (:obj:`Callable`): Called when they are, before anybody can read them. Both are called again if
              an exception interrupts them.
        Raises:
            - NotEnoughSpace: The disk is full; nothing changed, and ``regions`` are discarded.
        """
        narrow_columns = frozenset(narrow_columns)
        try:
            self.check_open()
            commit = self._prepared(regions, narrow_columns, info, rows, next_row, metas)
        except BaseException:
            regions.discard()
            raise
        former = self._regions

        def replace() -> None:
            self._change()
            commit()
            # Readers that are copying do it again.
            self._num_updates += 1
            self.index.forget()
            cleared()
            self._regions, self._narrow = regions, narrow_columns
            former.close()
            self._num_used = len(rows)
            self.index.next_row = max(next_row, self.next_row)
            self.index.load(rows, None if self.table_dir is None else self.table_dir.numbers)
            replaced()

        with self.write_lock, self.index.lock:
            finish(replace)

    def convert(
        self, columns: Mapping[str, ColumnSpec], info: Any, slots: Array, values: Columns, converted: Callable[[], None]
    ) -> None:
        """
        Overview:
            Have these columns instead, and the same rows. A kill leaves the table as it was, or as it will be.
        Arguments:
            - slots (:obj:`np.ndarray`): Of all rows that live.
            - values (:obj:`Mapping`): What the columns have in these slots.
            - converted (:obj:`Callable`): Called when the columns are others, with the table locked.
        Raises:
            - NotEnoughSpace: The disk is full; nothing changed.
        """
        with self.write_lock:
            regions = self.new_regions()
            try:
                regions.add(checked_specs(columns))
                regions.reserve(self._num_used)
                for name, column in regions.columns.items():
                    column[slots] = values[name]
                commit = self._prepared(regions, frozenset(), info, are_others=False)
            except BaseException:
                regions.discard()
                raise
            former = self._regions

            def convert() -> None:
                self._change()
                self._num_updates += 1
                commit()
                self._regions, self._narrow = regions, frozenset()
                former.close()
                converted()

            with self.index.lock:
                finish(convert)

    def resize(self, capacity: int, moving: Optional[Moving] = None) -> Tuple[Array, Array]:
        """
        Overview:
            Have another capacity from now on: where there are more rows than that, the oldest leave. O(capacity), and
            a copy of the table where it is in memory. Files keep their length, but not the space of what is no longer
            used. A disk that fails when there was room costs the oldest, which had to leave, and nothing else.
        Arguments:
            - moving (:obj:`Optional[Callable]`): Takes ``source`` and ``target``, and returns what is called when the
              rows have moved; again if an exception interrupts it.
        Returns:
            - source (:obj:`np.ndarray`): Slots whose rows had to move.
            - target (:obj:`np.ndarray`): Where they live now.
        Raises:
            - ConfigError: ``capacity`` is no positive integer.
            - NotEnoughSpace: The disk is full; nothing changed.
        """
        capacity = integer('capacity', capacity, 1)
        with self.write_lock, self.index.lock:
            self.check_open()
            resize_regions, resize_numbers = self._regions.resizing(capacity), self._resizing_numbers(capacity)
            # Readers that are copying do it again; others wait for the lock of the index.
            self._num_updates += 1
            self._change()
            self.index.remove(self.index.oldest(max(0, self.index.count - capacity)))
            # Before the first byte of those who move to their slots.
            self._sync_numbers()
            source, target = self.index.relocations(capacity)
            self._regions.move(source, target)
            if self.table_dir is not None:
                self.table_dir.move_values(source, target)
            self._sync_columns()
            self._sync_kept()
            former, move = self.index.row_of_slot, moving and moving(source, target)
            numbers: List[Array] = []

            def resize() -> None:
                if not numbers:
                    self.index.relocate(source, target)
                    self._sync_numbers()
                    numbers[:] = [resize_numbers()]
                self._num_used = min(self._num_used, capacity)
                resize_regions(self._num_used)
                self.index.resize(numbers[0], source, target)
                if move is not None:
                    move()
                if self.table_dir is None:
                    # Whoever is copying slots and looks at the old numbers has to see that they are others now.
                    former[:] = EMPTY

            try:
                finish(resize)
            except BaseException:
                if not numbers:
                    self.index.stay(target)
                raise
        return source, target

    def _prepared(
        self,
        regions: ColumnMemory,
        narrow_columns: FrozenSet[str],
        info: Any,
        rows: Array = NO_ROWS,
        next_row: int = 0,
        metas: Iterable[bytes] = (),
        are_others: bool = True,
    ) -> Callable[[], None]:
        """What makes other columns count, with other rows or the same; they are on the disk before their header is."""
        if self.table_dir is None:
            return lambda: None
        self._sync_regions(regions)
        columns = stored_columns(regions, narrow_columns)
        if not are_others or (not len(rows) and not self.index.count and next_row <= self.index.next_row):
            return self.table_dir.prepare(columns, info)
        return self.table_dir.replacing(columns, info, rows, next_row, metas)

    def _widen(self, name: str) -> None:
        logger.warning(
            'column %r was kept in a quarter of its memory, as all its values were k/255; a new row has others: from '
            'now on it is kept as float32. Nothing is lost.',
            name,
        )
        spec = np.dtype(np.float32), self.columns[name].shape[1:]
        replace = self._regions.replacing(name, spec, widen, self._num_used)

        def widen_column() -> None:
            with self.index.lock:
                # Readers that have the old column, and would take it for a wide one, do it again; others wait.
                self._num_updates += 1
                replace()
                self._narrow -= {name}
            self._describe(self.info)

        finish(widen_column)

    def _resizing_numbers(self, capacity: int) -> Callable[[], Array]:
        if self.table_dir is not None:
            return self.table_dir.resizing(capacity)
        numbers = filled(capacity, EMPTY, np.int64)

        def resize() -> Array:
            kept = min(capacity, self.capacity)
            numbers[:kept] = self.index.row_of_slot[:kept]
            return numbers

        return resize
