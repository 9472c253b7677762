"""Elements and metas in a table: in columns if they fit, else as Python objects, or packed if the table has a path."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Callable, Collection, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import treetensor.torch as ttorch

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.element_layout import ElementLayout
from ding_store.buffer.elements.objects import ObjectColumn
from ding_store.buffer.elements.packed import PackedColumn
from ding_store.buffer.elements.raw_columns import as_wide, complete, schema_of
from ding_store.buffer.interrupts import finish
from ding_store.buffer.metas.metas import Meta, MetaStore
from ding_store.buffer.sequences.sequences import Sequences
from ding_store.buffer.table.narrowing import candidates, widened_columns
from ding_store.buffer.table.outputs import Output
from ding_store.buffer.table.rows import RowIndex
from ding_store.buffer.table.specs import Columns
from ding_store.buffer.table.table import Keep, Table
from ding_store.columns import Schema
from ding_store.errors import SchemaMismatch

Choose = Callable[[RowIndex], Array]


class Read(NamedTuple):
    """Row numbers, elements and metas that were read, in the same order."""

    rows: Array
    elements: List[Any]
    metas: List[Meta]


class Elements(ElementLayout):
    """
    Overview:
        The elements that a buffer and its views share. The first element decides on the layout. Its leaves become the
        columns. If columns cannot hold it, all elements are stored as objects. Lists that turn out to vary in length,
        such as episodes, move from columns to objects.
    Arguments:
        - capacity (:obj:`int`): The maximum number of elements. The oldest are evicted when there are more.
        - path (:obj:`Optional[str]`): Directory of a table that survives its process, or None for a private table. With
          a path, lists of varying length are packed, and Python objects are refused.
        - fsync (:obj:`bool`): As in ``Table``.
        - begin_episodes (:obj:`bool`): Whether the collection of the rows found in ``path`` ended with its process.
    """

    def __init__(
        self, capacity: int, path: Optional[str] = None, fsync: bool = False, begin_episodes: bool = True
    ) -> None:
        self.table = Table({}, capacity, path, fsync)
        self._schema: Optional[Schema] = None
        self.objects = None
        table_dir = self.table.table_dir
        try:
            self.metas = MetaStore(
                self.table.index, self.table.write_lock, None if table_dir is None else table_dir.metas
            )
            self.sequences = Sequences(self.table, self.metas)
            self._restore()
            self.end_sequences([self.table.next_row], begin_episodes)
        except BaseException:
            self.table.close()
            raise
        self._outputs = self._new_outputs(self._schema)

    def append(
        self,
        elements: Sequence[Any],
        metas: Optional[Sequence[Optional[Mapping[Any, Any]]]] = None,
        note: Optional[Mapping[str, Any]] = None,
        keep: Optional[Keep] = None,
    ) -> Array:
        """
        Overview:
            Add elements, with or without metas. ``note`` is committed with them. ``keep`` is called just before.
        Returns:
            - rows (:obj:`np.ndarray`): The row numbers of the elements.
        Raises:
            - SchemaMismatch: An element does not fit the others. None was added.
        """
        return self._add(elements, metas, note, keep)[0]

    def push(self, element: Any, meta: Optional[Mapping[Any, Any]] = None) -> Tuple[int, Meta]:
        """Add one element. Return its row number and its meta, which the caller may modify."""
        with self.table.write_lock:
            self.table.check_open()
            write = self._writing(element) if meta is None else None
            if write is not None:
                slots, row = self.table.add_one(self._without_meta(write) if self.metas.is_used else write)
            else:
                rows, slots = self._add([element], None if meta is None else [meta])
                row = int(rows[0])
            return row, self.metas.get(int(slots[0]), row)

    def extend(
        self,
        columns: Columns,
        schema: Optional[Schema] = None,
        note: Optional[Mapping[str, Any]] = None,
        keep: Optional[Keep] = None,
        meta: Optional[Mapping[Any, Any]] = None,
        narrowed: Collection[str] = (),
    ) -> Array:
        """Add rows that are columns already, of the given schema or the table's, see ``StoreBuffer.extend``."""
        with self.table.write_lock:
            self.table.check_open()
            schema = schema or self.schema or schema_of(widened_columns(columns, narrowed))
            if self.objects is not None:
                elements = schema.decode(widened_columns(columns, narrowed))
                return self._add(elements, None if meta is None else [meta] * len(elements), note, keep)[0]
            if schema is not self.schema and schema != self.schema:
                if self.schema is None or not len(self.table):
                    self.start(schema, candidates(schema.columns(), columns, narrowed))
                else:
                    self._adapt(schema)
                columns = as_wide(columns, self.table.columns.specs, schema)
            columns = complete(columns, self.table.columns.specs)
            if meta is not None:
                keep = self._with_meta(meta, len(next(iter(columns.values()), ())), keep)
            elif self.metas.is_used:
                keep = self._without_metas(keep)
            return self.table.extend(columns, note, keep, narrowed)

    def _without_meta(self, write: Callable[[int], None]) -> Callable[[int], None]:
        """Return a function that writes a row and drops the meta of its slot, see ``_without_metas``."""

        def write_and_drop(slot: int) -> None:
            write(slot)
            self.metas.drop(np.array([slot]))

        return write_and_drop

    def _without_metas(self, keep: Optional[Keep]) -> Keep:
        """
        Return a ``keep`` function that drops the metas of the slots before the new rows are live. Readers would
        otherwise take them for metas of the new rows.
        """

        def drop(slots: Array, rows: Array) -> None:
            self.metas.drop(slots)
            if keep is not None:
                keep(slots, rows)

        return drop

    def _with_meta(self, meta: Mapping[Any, Any], num_rows: int, keep: Optional[Keep]) -> Keep:
        """Return a ``keep`` function that gives all rows this meta before they are live."""
        skipped = max(0, num_rows - self.table.capacity)
        first = self.table.next_row + skipped
        records = self.metas.encode_shared(np.arange(first, first + num_rows - skipped), meta)

        def keep_all(slots: Array, rows: Array) -> None:
            self.metas.record(records)
            self.metas.put_shared(slots, rows, meta)
            if keep is not None:
                keep(slots, rows)

        return keep_all

    def read(self, choose: Choose, warm: bool = True) -> Read:
        """
        Overview:
            Read elements and metas of the rows whose slots are chosen. Elements from columns are views of one gathered
            batch. ``warm`` puts the batch into memory that was used before and is free now.
        """
        rows, (decode, metas) = self.table.read(
            choose,
            lambda slots: (self._take(slots, warm), self._metas_of(slots)),
            is_all=not isinstance(self.objects, PackedColumn),
        )
        return Read(rows, decode(), metas)

    def read_columns(self, choose: Choose) -> Tuple[Array, Schema, Columns]:
        """
        Overview:
            Read the columns of the chosen rows. Return row numbers, schema and columns.
        Raises:
            - SchemaMismatch: The elements are objects.
        """
        rows, (columns, _) = self.table.read(choose, self._gather)
        return rows, self._columnar(), columns

    def read_steps(self, choose: Choose, length: int) -> Tuple[Array, Schema, Columns, Optional[ttorch.Tensor]]:
        """
        Read columns of ``length`` steps of sequences, like ``read_columns``. Also return their batch if it consists of
        views alone.
        """
        rows, (columns, output) = self.table.read(choose, self._gather)
        return rows, self._columnar(), columns, output.batch(length)

    def read_batch(self, choose: Choose) -> Tuple[Array, ttorch.Tensor, Callable[[], List[Any]]]:
        """Read one decoded batch. Return row numbers, the batch, and a function that makes its elements."""
        rows, (columns, output) = self.table.read(choose, self._gather)
        schema = self._columnar()
        batch = output.batch()
        if batch is None:
            batch = schema.decode_batch(columns)
        return rows, batch, lambda: schema.decode(columns)

    def end_sequences(self, rows: Iterable[int], begin_episodes: bool = True) -> None:
        """
        Overview:
            End all sequences before these rows: none continues from an earlier row to one of them.
        Arguments:
            - begin_episodes (:obj:`bool`): Whether every episode begins anew with these rows.
        """
        with self.table.write_lock:
            if len(self.table):
                oldest = int(self.table.rows_by_age()[0])
                self.sequences.breaks.add([(row, begin_episodes) for row in rows], oldest)
                self.sequences.replaced()

    def places_of_breaks(self) -> List[int]:
        """
        Return the positions, in order of age, of rows that do not follow the row before them although it has their
        group.
        """
        with self.table.write_lock:
            rows = self.table.rows_by_age()
            do_follow = (np.diff(rows) == 1) & (np.diff(self.sequences.breaks.segments(rows)) == 0)
            places: List[int] = (np.flatnonzero(~do_follow) + 1).tolist()
            return places

    def update(self, row: int, element: Optional[Any], meta: Optional[Mapping[Any, Any]]) -> bool:
        """Replace an element, its meta or both. Return whether the row was in the table."""
        rows = np.array([row], np.int64)
        with self.table.write_lock:
            self.table.check_open()
            with self.table.index.lock:
                slots, found = self.table.index.find(rows)
            if not found[0]:
                return False
            self.metas.encode(rows, None if meta is None else [meta])  # Check first that the meta can be stored.

            def update() -> None:
                if element is not None:
                    self._replace(rows, slots, element)
                if meta is not None:
                    self.metas.put(int(slots[0]), row, meta)

            finish(update)
            return True

    def __deepcopy__(self, memo: Dict[int, Any]) -> None:
        """Return None: a copied sampler belongs to no table. A copied buffer uses ``save_files.duplicate``."""

    def versions(self, name: str, slots: Array) -> Array:
        """
        Overview:
            Return the values of a column or meta key of integers in these slots. The index is locked.
        Returns:
            - values (:obj:`np.ndarray`): ``(n, steps)``, int64. One step, unless rows are sequences.
        Raises:
            - SchemaMismatch: There is no such column of integers, and a meta lacks the key.
        """
        column = self.table.columns.get(name)
        if column is not None and column.dtype.kind in 'iu':
            return column.read(slots).reshape(len(slots), -1).astype(np.int64)
        metas = [self.metas.peek(slot).get(name) for slot in slots.tolist()]
        if None in metas:
            found = '' if column is None else f' (its dtype is {column.dtype})'
            raise SchemaMismatch(
                f'version ({name!r}) is neither a column of integers{found} nor in every meta. Choose one of the '
                f'columns {sorted(self.table.columns)}, or push every row with this meta.'
            )
        return np.array(metas, np.int64)[:, None]

    def delete(self, rows: Array) -> None:
        with self.table.write_lock:
            slots = self.table.delete(rows)
            self.metas.drop(slots)
            if self.objects is not None:
                self.objects.drop(slots)

    def clear(self) -> None:
        """Delete all elements. The next element decides on the layout again. Row numbers continue to grow."""
        with self.table.write_lock:
            finish(self._clear)

    def _clear(self) -> None:
        self.table.clear()
        self.metas.clear()
        if self.objects is not None:
            self.objects.remove()
            self.objects = None

    def close(self) -> None:
        """Close the table and be empty. The files keep the elements for the next process."""
        with self.table.write_lock:
            self.metas.close()
            self.table.close()
            self._schema, self.objects = None, None

    def _add(
        self,
        elements: Sequence[Any],
        metas: Optional[Sequence[Optional[Mapping[Any, Any]]]],
        note: Optional[Mapping[str, Any]] = None,
        keep: Optional[Keep] = None,
    ) -> Tuple[Array, Array]:
        with self.table.write_lock:
            self.table.check_open()
            if self._schema is None and self.objects is None:
                self._decide(elements)
            try:
                return self._put(elements, metas, note, keep)
            except SchemaMismatch:
                if self.objects is not None and len(self.table):
                    raise
            self._make_fit(elements)
            return self._put(elements, metas, note, keep)

    def _put(
        self,
        elements: Sequence[Any],
        metas: Optional[Sequence[Optional[Mapping[Any, Any]]]],
        note: Optional[Mapping[str, Any]] = None,
        keep: Optional[Keep] = None,
    ) -> Tuple[Array, Array]:
        """Add elements. Return the row numbers of all of them, and the slots of those that are stored."""
        num_rows, capacity = len(elements), self.table.capacity
        skipped = max(0, num_rows - capacity)
        first = self.table.next_row + skipped
        kept_metas = None if metas is None else metas[skipped:]
        records = self.metas.encode(np.arange(first, first + num_rows - skipped), kept_metas)
        stored: Optional[Columns] = None
        if isinstance(self.objects, PackedColumn):
            stored = self.objects.store(elements[skipped:])
        elif self.table.columns.narrow and self.schema is not None:
            stored = self.table.shape.as_stored(self.schema.encode_parts(elements[skipped:], self.table.columns.narrow))
        with self._storing(), self.table.writing(num_rows - skipped, skipped, note) as (slots, rows):
            if stored is not None:
                self.table.columns.store(slots, stored)
            else:
                self._write(slots, elements[skipped:] if skipped else elements)
            if kept_metas is not None:
                self.metas.record(records)
                for slot, row, meta in zip(slots.tolist(), rows.tolist(), kept_metas):
                    self.metas.put(slot, row, meta, record=False)
            elif self.metas.is_used:
                self.metas.drop(slots)
            if keep is not None:
                keep(slots, rows)
        return np.arange(rows[-1] + 1 - num_rows, rows[-1] + 1) if skipped else rows, slots

    def _writing(self, element: Any) -> Optional[Callable[[int], None]]:
        """Return a function that writes this element to a slot, or None if the general code must write it."""
        if self._schema is None or self.objects is not None or self.table.table_dir is not None:
            return None
        writer = self._outputs.row_writer(self.table.columns.current)
        return None if writer is None else writer.writing(element)

    def _write(self, slots: Array, elements: Sequence[Any]) -> None:
        if isinstance(self.objects, ObjectColumn):
            self.objects.put(slots, elements)
            return
        assert self.schema is not None
        self.table.columns.encode(slots, self.schema, elements)

    def findings(self) -> List[str]:
        """Return the problems of elements that are not in columns."""
        with self.table.write_lock, self.table.index.lock:
            return [] if self.objects is None else self.objects.findings()

    def resize(self, capacity: int) -> None:
        """Change the capacity, see ``Table.resize``."""

        def moving(source: Array, target: Array) -> Callable[[], None]:
            moves = [each.moving(source, target, capacity) for each in (self.metas, self.objects) if each is not None]

            def move() -> None:
                for each in moves:
                    each()

            return move

        with self.table.write_lock:
            self.table.shape.resize(capacity, moving)

    def _replace(self, rows: Array, slots: Array, element: Any) -> None:
        columns: Optional[Columns] = None
        if self.schema is not None:
            with suppress(SchemaMismatch):
                columns = self.schema.encode([element])
            if columns is None:
                self._make_fit([element])
        if self.objects is not None:
            self.objects.update(rows, slots, element)
            return
        assert self.schema is not None
        self.table.update(rows, self.schema.encode([element]) if columns is None else columns)

    def _gather(self, slots: Array) -> Tuple[Columns, Output]:
        columns, cold = self.table.columns.sources
        return self._outputs.gather(columns, slots, cold)

    def _take(self, slots: Array, warm: bool) -> Callable[[], List[Any]]:
        """Copy the slots. Return a function that makes elements of the copy once it is known to be whole."""
        objects = self.objects
        if objects is not None:
            taken: Any = objects.take(slots)
            return lambda: objects.decode(taken)
        columns = self._gather(slots)[0] if warm else self.table.columns.take(slots)
        # Read the schema after the copy: an old schema would decode new columns wrongly, but a new one decodes old
        # columns well.
        schema = self._schema
        return lambda: schema.decode(columns) if schema is not None and columns else []

    def _metas_of(self, slots: Array) -> List[Meta]:
        get, rows = self.metas.get, self.table.index.row_of_slot.take(slots, mode='clip').tolist()
        return [get(slot, row) for slot, row in zip(slots.tolist(), rows)]
