"""Elements as columns of the table, one per leaf."""

from __future__ import annotations

from typing import IO, Any, Callable, FrozenSet, Mapping, Optional, Sequence, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.element_store import ElementStore, Make, Write
from ding_store.buffer.elements.save_blocks import Blocks, ColumnBlocks
from ding_store.buffer.sequences.unrolled import StepReader
from ding_store.buffer.table.encodings import Column, in_stored_form
from ding_store.buffer.table.outputs import Output, WarmOutputs
from ding_store.buffer.table.specs import Columns
from ding_store.buffer.table.table import Table
from ding_store.columns import Schema
from ding_store.errors import SchemaMismatch


class _Pinned:
    """Columns in the form that the table keeps, and pinned memory for batches of them."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.columns = columns
        self.kept = {name: in_stored_form(column) for name, column in columns.items()}
        self.narrow = frozenset(name for name, each in columns.items() if each.dtype != self.kept[name].dtype)
        specs = {name: (each.dtype, each.shape) for name, each in self.kept.items()}
        self.outputs = WarmOutputs(specs, is_pinned=True)


class ColumnElements(ElementStore):
    """
    Overview:
        Elements of one schema in columns. They are copied at each push and at each read. A table may have further
        columns for a moment, while a store with a wider schema takes the place of this one.
    """

    schema: Schema

    def __init__(self, table: Table, schema: Schema) -> None:
        super().__init__(table)
        self.schema, self.specs = schema, schema.columns()
        self._outputs, self._columns = WarmOutputs(self.specs, schema.plain_batch), table.columns
        self._step_reader: Optional[StepReader] = None
        self._pinned: Optional[_Pinned] = None

    @property
    def info(self) -> Any:
        return self.schema.to_json()

    def take(self, slots: Array, is_warm: bool = True) -> Make:
        columns = self.gather(slots)[1] if is_warm else self._columns.take(slots)
        return lambda: self.schema.decode(columns)

    def gather(self, slots: Array) -> Tuple[Schema, Columns, Output]:
        # The outputs are as old as this store, so the columns of the table have all their names.
        columns, cold = self._columns.sources
        arrays, output = self._outputs.gather(columns, slots, cold)
        return self.schema, arrays, output

    def gather_for_device(self, slots: Array) -> Tuple[Schema, Columns, FrozenSet[str]]:
        """
        Overview:
            Gather rows into pinned memory, as bytes where the table keeps bytes.
        Returns:
            - schema (:obj:`Schema`), columns (:obj:`Columns`)
            - narrow (:obj:`FrozenSet[str]`): Names of the columns that are bytes k of float32 values k/255.
        """
        columns, cold = self._columns.sources
        pinned = self._pinned  # another thread may replace it
        if pinned is None or pinned.columns is not columns:
            pinned = self._pinned = _Pinned(columns)
        arrays, _ = pinned.outputs.gather(pinned.kept, slots, cold)
        return self.schema, arrays, pinned.narrow

    def take_steps(self, slots: Array) -> Tuple[StepReader, Columns, Columns]:
        reader = self._step_reader
        if reader is None:
            reader = self._step_reader = StepReader(self.schema)
        return (reader, *reader.take(slots, *self._columns.sources))

    def prepare(self, elements: Sequence[Any]) -> Write:
        table, schema = self._table, self.schema
        columns = self._columns
        if columns.is_encoded:
            stored = table.shape.as_stored(schema.encode_parts(elements, columns.narrow), as_references=True)
            return lambda slots: columns.store(slots, stored)
        return lambda slots: columns.encode(slots, schema, elements)

    def writing(self, element: Any) -> Optional[Callable[[int], None]]:
        if self._table.table_dir is not None:
            return None
        writer = self._outputs.row_writer(self._columns.current)
        return None if writer is None else writer.writing(element)

    def update(self, rows: Array, slots: Array, element: Any) -> None:
        self._table.update(rows, self.schema.encode([element]))

    def merged(self, schema: Schema) -> Schema:
        merged, known = self.schema.merge(schema), self._columns.specs
        for name, (dtype, shape) in merged.columns().items() if merged != self.schema else ():
            if known.get(name, (dtype, shape)) != (dtype, shape):
                self._check_wider(name, dtype)
        return merged

    def blocks(self, file: IO[bytes], is_current: Callable[[], bool]) -> Blocks:
        return ColumnBlocks(file, self._table)

    def _check_wider(self, name: str, dtype: np.dtype) -> None:
        with self._table.index.lock:
            values = self._columns.read(name, self._table.index.live_slots)
        if values.dtype.kind in 'iu' and not np.array_equal(values.astype(dtype).astype(values.dtype), values):
            raise SchemaMismatch(f'leaf {name!r}: it has earlier integers that {dtype} cannot represent exactly')
