"""The elements and metas of a table: in columns if they fit, else as Python objects, or packed if it has a path."""

from __future__ import annotations

from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np
import treetensor.torch as ttorch

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.column_elements import ColumnElements
from ding_store.buffer.elements.current_store import CurrentStore
from ding_store.buffer.elements.device_batches import DeviceBatches, Sent
from ding_store.buffer.elements.element_store import ElementStore
from ding_store.buffer.elements.patches import check_patch, choose_rows
from ding_store.buffer.elements.raw_columns import as_wide, complete, elements_of, schema_of
from ding_store.buffer.interrupts import finish
from ding_store.buffer.metas.metas import Meta, MetaStore
from ding_store.buffer.metas.new_rows import with_meta, without_meta, without_metas
from ding_store.buffer.samplers.removers import Reservoir
from ding_store.buffer.sequences.sequences import Sequences
from ding_store.buffer.table.frame_references import with_values, with_wide_values
from ding_store.buffer.table.narrowing import candidates, widened_columns
from ding_store.buffer.table.outputs import Output
from ding_store.buffer.table.rows import RowIndex
from ding_store.buffer.table.specs import Columns
from ding_store.buffer.table.table import Keep, Table
from ding_store.columns import Schema
from ding_store.columns.ragged import Names, ragged_lengths
from ding_store.errors import SchemaMismatch

Choose = Callable[[RowIndex], Array]
Metas = Optional[Sequence[Optional[Mapping[Any, Any]]]]


class Read(NamedTuple):
    """Row numbers, elements and metas that were read, in the same order."""

    rows: Array
    elements: List[Any]
    metas: List[Meta]


class Elements:
    """
    Overview:
        The elements that a buffer and its views share. They are in one ``ElementStore``. The first element decides
        which. Its leaves become the columns. If columns cannot hold it, all elements are stored one by one. Lists that
        turn out to vary in length, such as episodes, move from columns to such a store.
    Arguments:
        - capacity (:obj:`int`): The maximum number of elements. The oldest are evicted when there are more.
        - path (:obj:`Optional[str]`): Directory of a table that survives its process, or None for a private table. With
          a path, lists of varying length are packed, and Python objects are refused.
        - fsync (:obj:`bool`): As in ``Table``.
        - begin_episodes (:obj:`bool`): Whether the collection of the rows found in ``path`` ended with its process.
        - share_frames (:obj:`bool`): As in ``TableColumns``.
        - ragged (:obj:`Union[str, Collection]`): Names of leaves whose first dimension varies, or 'all'.
    """

    def __init__(
        self,
        capacity: int,
        path: Optional[str] = None,
        fsync: bool = False,
        begin_episodes: bool = True,
        share_frames: bool = True,
        ragged: Names = (),
    ) -> None:
        self.table = Table({}, capacity, path, fsync, share_frames)
        #: Decides which new rows are stored. None: all are.
        self.reservoir: Optional[Reservoir] = None
        journal = None if self.table.table_dir is None else self.table.table_dir.metas
        try:
            self.metas = MetaStore(self.table.index, self.table.write_lock, journal)
            self.sequences = Sequences(self.table, self.metas)
            self.metas.restore()
            self.current = CurrentStore(self.table, self.sequences, ragged)
            self.sequences.end([self.table.next_row], begin_episodes)
        except BaseException:
            self.table.close()
            raise

    @property
    def schema(self) -> Optional[Schema]:
        """The leaves of an element. None before the first element, and if elements are not in columns."""
        return self.current.store.schema

    @property
    def ragged(self) -> Names:
        """Names of the leaves whose first dimension varies, or 'all'."""
        return self.current.ragged

    @property
    def store(self) -> ElementStore:
        """The store that holds all elements at present."""
        return self.current.store

    # Reads.

    def read(self, choose: Choose, warm: bool = True) -> Read:
        """
        Overview:
            Read elements and metas of the rows whose slots are chosen. Elements from columns are views of one gathered
            batch. ``warm`` puts the batch into memory that was used before and is free now.
        """
        rows, (make, metas) = self.table.read(
            choose,
            lambda slots: (self.current.store.take(slots, warm), self._metas_of(slots)),
            is_all=self.store.is_in_memory,
        )
        return Read(rows, make(), metas)

    def read_elements(self, choose: Choose) -> List[Any]:
        """Read elements like ``read``, without their metas."""
        make = self.table.read(choose, lambda slots: self.current.store.take(slots), is_all=self.store.is_in_memory)[1]
        return make()

    def gather(self, choose: Choose) -> Tuple[Array, Schema, Columns, Output]:
        """
        Overview:
            Read the columns of the chosen rows. Return row numbers, schema, columns and their memory.
        Raises:
            - SchemaMismatch: The elements are not in columns.
        """
        rows, gathered = self.table.read(choose, self._gather, self.store.is_in_memory)
        return (rows, *gathered)

    def read_batch(self, choose: Choose) -> Tuple[Array, ttorch.Tensor, Callable[[], List[Any]], Mapping[str, Array]]:
        """
        Read one decoded batch. Return row numbers, the batch, a function that makes its elements, and the lengths of
        ragged leaves.
        """
        rows, (schema, columns, output) = self.table.read(choose, self._gather, self.store.is_in_memory)
        batch = output.batch()
        if batch is None:
            batch = schema.decode_batch(columns)
        return rows, batch, lambda: schema.decode(columns), ragged_lengths(schema, columns)

    def can_send(self) -> bool:
        """Return whether ``read_and_send`` works: elements are mappings of tensors, in columns, none of them ragged."""
        store = self.current.store
        return isinstance(store, ColumnElements) and store.schema.plain_batch is not None

    def read_and_send(self, choose: Choose, device: DeviceBatches) -> Tuple[Array, Sent, Callable[[], List[Any]]]:
        """Read one batch and start to copy it to a GPU. Return row numbers, the batch, and what makes its elements."""
        rows, (schema, columns, narrow) = self.table.read(choose, self._gather_for_device, self.store.is_in_memory)
        sent = device.send(schema, columns, narrow)
        return rows, sent, lambda: schema.decode(widened_columns(columns, narrow))

    def _gather_for_device(self, slots: Array) -> Any:
        store = self.current.store
        assert isinstance(store, ColumnElements)
        return store.gather_for_device(slots)

    def read_unrolled(self, choose: Choose) -> Tuple[Array, Any]:
        """Read elements that are sequences themselves. Return row numbers, and what ``take_steps`` returned."""
        return self.table.read(choose, lambda slots: self.current.store.take_steps(slots))

    def _gather(self, slots: Array) -> Tuple[Schema, Columns, Output]:
        # Each attempt of a read copies from the store of that moment. The copy comes with the schema of that store.
        return self.current.store.gather(slots)

    def _metas_of(self, slots: Array) -> List[Meta]:
        get, rows = self.metas.get, self.table.index.row_of_slot.take(slots, mode='clip').tolist()
        return [get(slot, row) for slot, row in zip(slots.tolist(), rows)]

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

    def findings(self) -> List[str]:
        """Return the problems of elements that are not in columns."""
        with self.table.write_lock, self.table.index.lock:
            return self.store.findings()

    # New rows.

    def append(
        self,
        elements: Sequence[Any],
        metas: Metas = None,
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
            if meta is None:
                slot, row = self._add_one(element)
            else:
                rows, slots = self._add([element], [meta])
                slot, row = int(slots[0]), int(rows[0])
            return row, self.metas.get(slot, row)

    def add(self, element: Any) -> int:
        """Add one element, like ``push``. Return its row number."""
        with self.table.write_lock:
            return self._add_one(element)[1]

    def _add_one(self, element: Any) -> Tuple[int, int]:
        """Add one element without a meta. Return its slot and its row number."""
        self.table.check_open()
        try:
            write = self.current.store.writing(element)
            if write is None:
                rows, slots = self._add([element], None)
                return int(slots[0]), int(rows[0])
            return self.table.add_one(without_meta(self.metas, write) if self.metas.is_used else write)
        except BaseException:
            finish(self.store.give_back)
            raise

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
            store = self.current.store
            if store.takes_any or self.ragged:
                if schema is None or schema.ragged:
                    elements = elements_of(widened_columns(columns, narrowed))
                else:
                    elements = schema.decode(with_wide_values(columns, narrowed))
                return self._add(elements, None if meta is None else [meta] * len(elements), note, keep)[0]
            schema = schema or store.schema or schema_of(widened_columns(columns, narrowed))
            if schema is not store.schema and schema != store.schema:
                columns = with_values(columns)
                if store.schema is None or not len(self.table):
                    self.current.start(schema, candidates(schema.columns(), columns, narrowed))
                else:
                    self.current.widen(store.merged(schema))
                columns = as_wide(columns, self.table.columns.specs, schema)
            columns = complete(columns, self.table.columns.specs)
            if meta is not None:
                num_rows = len(next(iter(columns.values()), ()))
                keep = with_meta(self.metas, self._kept_rows(num_rows), meta, keep)
            elif self.metas.is_used:
                keep = without_metas(self.metas, keep)
            return self.table.extend(columns, note, keep, narrowed)

    def _add(
        self,
        elements: Sequence[Any],
        metas: Metas,
        note: Optional[Mapping[str, Any]] = None,
        keep: Optional[Keep] = None,
    ) -> Tuple[Array, Array]:
        with self.table.write_lock:
            self.table.check_open()
            try:
                return self._put(elements, metas, note, keep)
            except SchemaMismatch:
                if self.store.takes_any and len(self.table):
                    raise
            self.current.make_fit(elements)
            return self._put(elements, metas, note, keep)

    def _put(
        self,
        elements: Sequence[Any],
        metas: Metas,
        note: Optional[Mapping[str, Any]] = None,
        keep: Optional[Keep] = None,
    ) -> Tuple[Array, Array]:
        """Add elements. Return the row numbers of all of them, and the slots of those that are stored."""
        num_rows, kept_rows = len(elements), self._kept_rows(len(elements))
        skipped = num_rows - len(kept_rows)
        kept_metas = None if metas is None else metas[skipped:]
        records = self.metas.encode(kept_rows, kept_metas)
        try:
            write = self.current.store.prepare(elements[skipped:] if skipped else elements)
            with self.table.writing(len(kept_rows), skipped, note) as (slots, rows):
                write(slots)
                if kept_metas is not None:
                    self.metas.record(records)
                    for slot, row, meta in zip(slots.tolist(), rows.tolist(), kept_metas):
                        self.metas.put(slot, row, meta, record=False)
                elif self.metas.is_used:
                    self.metas.drop(slots)
                if keep is not None:
                    keep(slots, rows)
        except BaseException:
            self.store.give_back()
            raise
        self.table.shape.judge_sharing()
        return np.arange(rows[-1] + 1 - num_rows, rows[-1] + 1) if skipped else rows, slots

    def _kept_rows(self, num_rows: int) -> Array:
        """Return the numbers of those of so many new rows that will be stored: the last ones of too many."""
        first, skipped = self.table.next_row, max(0, num_rows - self.table.capacity)
        return np.arange(first + skipped, first + num_rows)

    # Changes of rows.

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
                    self._update(rows, slots, element)
                if meta is not None:
                    self.metas.put(int(slots[0]), row, meta)

            finish(update)
            return True

    def _update(self, rows: Array, slots: Array, element: Any) -> None:
        try:
            self.store.update(rows, slots, element)
            return
        except SchemaMismatch:
            if self.store.takes_any:
                raise
        self.current.make_fit([element])
        self.store.update(rows, slots, element)

    def patch(self, rows: Array, columns: Columns, newer_than: Optional[str]) -> Array:
        """Overwrite some columns of many rows at once, see ``StoreBuffer.update_if_present``."""
        table = self.table
        with table.write_lock:
            table.check_open()
            if self.schema is None:
                if not len(table):
                    return np.zeros(len(rows), bool)
                raise SchemaMismatch('the elements are Python objects, which have no columns. Use update().')
            check_patch(columns, table.columns.specs, len(rows), newer_than, self.schema.ragged)
            with table.index.lock:
                slots, found = table.index.find(rows)
                versions = None
                if newer_than is not None:
                    stored = np.zeros(len(rows), columns[newer_than].dtype)
                    stored[found] = table.columns.read(newer_than, slots[found]).reshape(-1)
                    versions = columns[newer_than].reshape(-1), stored
            written, last = choose_rows(rows, found, versions)
            if len(last):
                table.update(rows[last], {name: values[last] for name, values in columns.items()})
            return written

    def delete(self, rows: Array) -> None:
        with self.table.write_lock:
            slots = self.table.delete(rows)
            self.metas.drop(slots)
            self.store.drop(slots)

    def resize(self, capacity: int) -> None:
        """Change the capacity, see ``Table.resize``."""

        def moving(source: Array, target: Array) -> Callable[[], None]:
            moves = [self.metas.moving(source, target, capacity), self.store.moving(source, target, capacity)]

            def move() -> None:
                for each in moves:
                    each()

            return move

        with self.table.write_lock:
            self.table.shape.resize(capacity, moving)

    def clear(self) -> None:
        """Delete all elements. The next element decides on the store again. Row numbers continue to grow."""
        with self.table.write_lock:
            finish(self._clear)

    def _clear(self) -> None:
        self.table.clear()
        self.metas.clear()
        self.current.clear()

    def close(self) -> None:
        """Close the table and be empty. The files keep the elements for the next process."""
        with self.table.write_lock:
            self.metas.close()
            self.table.close()
            self.current.close()

    def __deepcopy__(self, memo: Dict[int, Any]) -> None:
        """Return None: a copied sampler belongs to no table. A copied buffer uses ``save_files.duplicate``."""

    def check_fit(self, elements: Sequence[Any]) -> None:
        """Raise SchemaMismatch if an empty buffer would not accept these elements."""
        self.current.check_fit(elements)
