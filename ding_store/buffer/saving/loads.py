"""Replacement of a buffer's contents by loaded ones, which are complete in memory or files before anything changes."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.element_store import ElementStore, NoElements
from ding_store.buffer.elements.elements import Elements
from ding_store.buffer.elements.stores import new_store
from ding_store.buffer.sequences.breaks import Break
from ding_store.buffer.table.columns import TableColumns
from ding_store.buffer.table.frame_references import with_wide_values
from ding_store.buffer.table.narrowing import candidates
from ding_store.buffer.table.specs import ColumnSpec
from ding_store.columns import Schema
from ding_store.columns.ragged import Names
from ding_store.errors import SchemaMismatch


class Loaded(NamedTuple):
    """
    Overview:
        Loaded elements, ordered by age.
    Arguments:
        - schema (:obj:`Optional[Schema]`): None if the elements are Python objects, or if there are none.
        - parts (:obj:`Iterator`): Columns of consecutive rows, in chunks. Narrow columns are bytes or float32. Not used
          if there are objects.
        - narrow (:obj:`Optional[List[str]]`): Columns that can be stored as bytes. If None, the first part decides.
        - objects (:obj:`Optional[Iterable]`): Elements that are not in columns, or their packets, which are whole.
        - metas (:obj:`List`): One per row, or none at all.
        - counts (:obj:`Optional[Dict]`): Counts of the saved buffer's limiter.
        - breaks (:obj:`Sequence[Break]`): The rows at which sequences end.
    """

    schema: Optional[Schema]
    parts: Iterator[Dict[str, Array]]
    narrow: Optional[List[str]]
    rows: Array
    objects: Optional[Iterable[Any]]
    metas: List[Optional[Dict[Any, Any]]]
    next_row: int
    counts: Optional[Dict[str, int]] = None
    breaks: Sequence[Break] = ()


def replace(elements: Elements, loaded: Loaded) -> None:
    """
    Overview:
        Replace the elements and metas of a buffer. Needs space for the old and the new elements meanwhile.
    Raises:
        - NotEnoughSpace: There is too little space. Nothing changed.
        - SchemaMismatch: A table with a path cannot hold the elements or metas. Nothing changed. The same holds for
          exceptions from ``parts`` and ``objects``.
    """
    table, metas, sequences = elements.table, elements.metas, elements.sequences
    loaded = _with_ragged(loaded, elements.ragged)
    rows, slots = loaded.rows, np.arange(len(loaded.rows))

    def cleared() -> None:
        metas.clear(record=False)
        sequences.breaks.replace(loaded.breaks)

    with table.write_lock:
        columns = table.shape.new_columns()
        is_none = loaded.schema is None and loaded.objects is None
        store = NoElements(table) if is_none else new_store(table, loaded.schema)
        with elements.current.changing_to(store) as become:

            def replaced() -> None:
                become()
                for slot, row, meta in zip(slots.tolist(), rows.tolist(), loaded.metas):
                    metas.put(slot, row, meta, record=False)
                sequences.replaced()

            try:
                if loaded.objects is None:
                    _fill(columns, loaded, store.specs)
                else:
                    _adopt(columns, store, slots, loaded.objects)
                records = metas.records_of(rows, loaded.metas)
                sequences.breaks.prepare(loaded.breaks)
                table.shape.replace(columns, store.info, rows, loaded.next_row, records, cleared, replaced)
            except BaseException:
                if elements.store is not store:
                    columns.discard()
                    sequences.breaks.take_back()
                raise


def _with_ragged(loaded: Loaded, names: Names) -> Loaded:
    """
    Overview:
        Return the contents in the form that a buffer with these ragged leaves has.
    Raises:
        - SchemaMismatch: They cannot have that form.
    """
    if not names:
        return loaded
    if not len(loaded.rows):
        return loaded._replace(schema=None, objects=None)
    if loaded.schema is None:
        raise SchemaMismatch(f'a buffer with ragged leaves {names!r} cannot load elements without a common schema')
    found, parts = loaded.schema, loaded.parts
    schema = found.with_ragged(names)
    if loaded.objects is not None or schema == found:
        return loaded._replace(schema=schema)

    def elements() -> Iterator[Any]:
        for part in parts:
            narrowed = [name for name in loaded.narrow or () if part[name].dtype == np.uint8]
            yield from found.decode(with_wide_values(part, narrowed))

    return loaded._replace(schema=schema, objects=elements())


def _adopt(columns: TableColumns, store: ElementStore, slots: Array, objects: Iterable[Any]) -> None:
    """Put elements that are not in columns into a store, and what it stores in columns into these."""
    columns.add(store.specs)
    columns.reserve(len(slots))
    columns.fill(0, store.adopt(slots, objects))


def _fill(columns: TableColumns, loaded: Loaded, specs: Mapping[str, ColumnSpec]) -> None:
    """Write all parts to columns of these specs."""
    if loaded.schema is None:
        return
    parts = loaded.parts
    first = next(parts, None)
    columns.add(specs, candidates(specs, first or {}) if loaded.narrow is None else loaded.narrow)
    columns.reserve(len(loaded.rows))
    place = 0
    while first is not None:
        columns.fill(place, first)
        place += len(next(iter(first.values()), ()))
        first = next(parts, None)
