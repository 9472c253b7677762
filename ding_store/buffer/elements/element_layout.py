"""The layout of elements and its changes: columns of a schema, or storage outside of columns."""

from __future__ import annotations

from typing import Any, Iterable, List, Mapping, Optional, Sequence

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements import packed
from ding_store.buffer.elements.non_columnar import NonColumnar
from ding_store.buffer.elements.objects import ObjectColumn
from ding_store.buffer.elements.raw_columns import fill_values
from ding_store.buffer.elements.step_lists import check_may_differ, tell
from ding_store.buffer.interrupts import finish
from ding_store.buffer.metas.metas import MetaStore
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.sequences.breaks import Break
from ding_store.buffer.sequences.sequences import Sequences
from ding_store.buffer.table.columns import TableColumns
from ding_store.buffer.table.narrowing import candidates
from ding_store.buffer.table.outputs import WarmOutputs
from ding_store.buffer.table.specs import Columns
from ding_store.columns import NotColumnar, Schema
from ding_store.errors import CorruptPayload, SchemaMismatch


class ElementLayout(NonColumnar):
    """The part of ``Elements`` that chooses and changes the layout."""

    metas: MetaStore
    sequences: Sequences
    _schema: Optional[Schema]
    _outputs: WarmOutputs

    def _restore(self) -> None:
        """Restore metas and layout of the elements that the table directory holds."""
        self.metas.restore()
        table_dir, info = self.table.table_dir, self.table.info
        if table_dir is None:
            return
        if not packed.is_packed(table_dir):
            self._schema = None if info is None else self._stored_schema(table_dir)
        elif len(self.table):
            self.objects = self._new_objects()
            return
        packed.remove_leftover(table_dir)

    def _stored_schema(self, table_dir: TableDirectory) -> Schema:
        """Return the schema in the header. Raises CorruptPayload if the columns are not of that schema."""
        try:
            schema = Schema.from_json(table_dir.header.info)
            columns = schema.columns()
        except SchemaMismatch as e:
            raise CorruptPayload(f'the header in {table_dir.path!r} holds no valid schema of elements: {e}') from e
        if columns != self.table.columns.specs:
            raise CorruptPayload(f'the header in {table_dir.path!r} names other columns than those of its schema')
        return schema

    @property
    def schema(self) -> Optional[Schema]:
        """The leaves of an element. None before the first element, and if elements are objects."""
        return None if self.objects is not None else self._schema

    def start(self, schema: Schema, narrow: Iterable[str] = ()) -> None:
        """
        Overview:
            Delete all elements, and prepare columns for elements of this schema.
        Arguments:
            - narrow (:obj:`Iterable`): Columns that can be stored as bytes, see ``candidates``.
        """

        def started() -> None:
            self._outputs = self._new_outputs(schema)
            if self.objects is not None:
                self.objects.remove()
            self._schema, self.objects = schema, None

        if schema != self.schema:
            self.table.shape.replace_columns(schema.columns(), schema.to_json(), narrow, started)
        else:
            finish(started)

    def start_objects(self) -> None:
        """Delete all elements, and prepare for elements that columns cannot hold."""

        def started() -> None:
            self._schema, self.objects = None, self._new_objects()
            self._outputs = self._new_outputs(None)

        if self.table.table_dir is None:
            self.table.shape.replace_columns({}, replaced=started)
        else:
            self.table.shape.replace_columns(packed.SPECS, packed.INFO, replaced=started)

    def replace(
        self,
        schema: Optional[Schema],
        objects: Optional[Iterable[Any]],
        columns: TableColumns,
        rows: Array,
        next_row: int,
        metas: Sequence[Optional[Mapping[Any, Any]]],
        breaks: Sequence[Break] = (),
    ) -> None:
        """
        Overview:
            Replace all elements and metas. The new elements are in ``columns``, or are objects or packets. There is one
            meta for each row, or none at all.
        Arguments:
            - breaks (:obj:`Sequence[Break]`): The rows at which the sequences of the new elements end.
        Raises:
            - SchemaMismatch: A meta holds a value that cannot be stored. Nothing changed.
            - NotEnoughSpace: The disk is full. Nothing changed. The same holds for exceptions from ``objects``.
        """
        is_packed = objects is not None and self.table.table_dir is not None
        kept: Optional[List[Any]] = None
        try:
            records = self.metas.records_of(rows, metas)
            self.sequences.breaks.prepare(breaks)
            if objects is not None and is_packed:
                self._pack(objects, len(rows), columns)
            elif objects is not None:
                kept = packed.unpacked(objects)
        except BaseException:
            columns.discard()
            self._give_back()
            self.sequences.breaks.take_back()
            raise
        former = self.objects

        def cleared() -> None:
            self.metas.clear(record=False)
            self.sequences.breaks.replace(breaks)

        def replaced() -> None:
            slots = np.arange(len(rows))
            self._schema, self.objects = schema, None if objects is None else self._new_objects()
            if isinstance(self.objects, ObjectColumn) and kept is not None:
                self.objects.put(slots, kept)
            self._outputs = self._new_outputs(schema)
            for slot, row, meta in zip(slots.tolist(), rows.tolist(), metas):
                self.metas.put(slot, row, meta, record=False)
            self.sequences.replaced()

        info = packed.INFO if is_packed else None if schema is None else schema.to_json()
        try:
            self.table.shape.replace(columns, info, rows, next_row, records, cleared, replaced)
        except BaseException:
            self._give_back()
            self.sequences.breaks.take_back()
            raise
        if former is not None and not is_packed:
            former.remove()

    def check_fit(self, elements: Sequence[Any]) -> None:
        """
        Overview:
            Check that an empty buffer would accept these elements.
        Raises:
            - SchemaMismatch: It would not.
        """
        try:
            Schema.infer(elements)
        except SchemaMismatch as e:
            check_may_differ(None, elements, e)
            for element in elements if self.table.table_dir is not None else ():
                try:
                    Schema.infer([element])
                except NotColumnar as reason:
                    self._refuse_objects(reason)

    def _decide(self, elements: Sequence[Any]) -> None:
        try:
            schema = Schema.infer(elements)
        except SchemaMismatch as e:
            difference = check_may_differ(None, elements, e)
            if isinstance(e, NotColumnar):
                self._refuse_objects(e)
            self.start_objects()
            tell(difference)
        else:
            self.start(schema, candidates(schema.columns(), schema.encode(elements[:1])))

    def _make_fit(self, elements: Sequence[Any]) -> None:
        """
        Change the layout after a mismatch: widen the schema, or move to objects. Raise if the elements cannot fit.
        """
        if len(self.table) == 0:
            self._decide(elements)
            return
        try:
            self._adapt(Schema.infer(elements, may_be_empty=True))
        except SchemaMismatch as e:
            difference = check_may_differ(self.schema, elements, e)
            if isinstance(e, NotColumnar):
                self._refuse_objects(e)
            self._move_to_objects()
            tell(difference)

    def _adapt(self, schema: Schema) -> None:
        """Extend the columns so that they also hold elements of this schema."""
        assert self.schema is not None
        merged = self.schema.merge(schema)
        known, specs = self.table.columns.specs, merged.columns()
        added = {name: spec for name, spec in specs.items() if name not in known}
        wider = {name: spec for name, spec in specs.items() if known.get(name, spec) != spec}
        for name, (dtype, _) in wider.items():
            self._check_wider(name, dtype)
        info = merged.to_json()

        def adapted() -> None:
            self._outputs = self._new_outputs(merged)
            # Set the schema last: readers use it after their copy, and an old schema decodes old rows well.
            self._schema = merged

        if added or wider or (self.table.table_dir is not None and self.table.info != info):
            self.table.shape.add_columns(added, fill_values(added, known), info, adapted, wider)
        else:
            finish(adapted)

    def _check_wider(self, name: str, dtype: np.dtype) -> None:
        with self.table.index.lock:
            values = self.table.columns.read(name, self.table.index.live_slots)
        if values.dtype.kind in 'iu' and not np.array_equal(values.astype(dtype).astype(values.dtype), values):
            raise SchemaMismatch(f'leaf {name!r}: it has earlier integers that {dtype} cannot represent exactly')

    def _move_to_objects(self) -> None:
        with self.table.index.lock:
            slots = self.table.index.slots_by_age().astype(np.intp)
        elements, objects = self._decode(self.table.columns.take(slots)), self._new_objects()
        if isinstance(objects, ObjectColumn):
            objects.put(slots, elements)
            # Readers between a copy and its decoding still hold the old columns and their schema.
            self.objects = objects
            return

        def converted() -> None:
            self._schema, self.objects, self._outputs = None, objects, self._new_outputs(None)
            objects.published(slots)

        with self._storing():
            self.table.shape.convert(packed.SPECS, packed.INFO, slots, objects.store(elements), converted)

    def _new_outputs(self, schema: Optional[Schema]) -> WarmOutputs:
        """Return outputs for the present columns, after a change of the columns."""
        self.sequences.drop_columns()
        return WarmOutputs(self.table.columns.specs, None if schema is None else schema.plain_batch)

    def _columnar(self) -> Schema:
        schema = self._schema
        if schema is None or self.objects is not None:
            raise SchemaMismatch('elements stored as Python objects cannot be collated into a batch. Use sample().')
        return schema

    def _decode(self, columns: Columns) -> List[Any]:
        return self._schema.decode(columns) if self._schema is not None and columns else []
