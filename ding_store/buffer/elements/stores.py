"""The choice of a table's element store."""

from __future__ import annotations

from typing import Optional

import numpy as np

from ding_store.buffer.elements.column_elements import ColumnElements
from ding_store.buffer.elements.element_store import ElementStore, NoElements
from ding_store.buffer.elements.object_elements import ObjectElements
from ding_store.buffer.elements.packed_elements import INFO, PackedElements
from ding_store.buffer.elements.packet_file import SPECS, remove_leftover
from ding_store.buffer.elements.ragged_elements import RaggedElements, specs_of
from ding_store.buffer.persistence.table_directory import TableDirectory
from ding_store.buffer.table.table import Table
from ding_store.columns import Schema
from ding_store.errors import CorruptPayload, FormatMismatch, SchemaMismatch


def new_store(table: Table, schema: Optional[Schema]) -> ElementStore:
    """
    Return the store for elements of this schema. Without a schema, elements are objects of this process, or are packed
    if the table has a path.
    """
    if schema is not None:
        return RaggedElements(table, schema) if schema.ragged else ColumnElements(table, schema)
    return ObjectElements(table) if table.table_dir is None else PackedElements(table)


def opened_store(table: Table) -> ElementStore:
    """
    Overview:
        Return the store of the elements that the table's directory holds.
    Raises:
        - FormatMismatch: They were packed by another version.
        - CorruptPayload: The header is damaged.
    """
    table_dir = table.table_dir
    if table_dir is None:
        return NoElements(table)
    is_packed = _is_packed(table_dir)
    if is_packed and len(table):
        return PackedElements(table)
    store = NoElements(table) if is_packed or table.info is None else new_store(table, _stored_schema(table))
    if store.file is None:
        remove_leftover(table_dir)
    return store


def _is_packed(table_dir: TableDirectory) -> bool:
    """
    Overview:
        Return whether the elements in a directory are packed.
    Raises:
        - FormatMismatch: They were packed by another version.
    """
    info = table_dir.header.info
    if isinstance(info, dict) and info.keys() == INFO.keys() and info != INFO:
        raise FormatMismatch(
            f'{table_dir.path!r} holds packed elements of version {info["packed"]}, but this ding_store reads only '
            f'version {INFO["packed"]}. Use the version of ding_store that wrote them.'
        )
    if info != INFO:
        return False
    specs = {column.name: (np.dtype(column.dtype), tuple(column.shape)) for column in table_dir.header.columns}
    if specs != SPECS:
        raise CorruptPayload(f'the header in {table_dir.path!r} names other columns than packed elements have')
    return True


def _stored_schema(table: Table) -> Schema:
    """Return the schema in the header. Raises CorruptPayload if the columns are not of that schema."""
    assert table.table_dir is not None
    path = table.table_dir.path
    try:
        schema = Schema.from_json(table.info)
    except SchemaMismatch as e:
        raise CorruptPayload(f'the header in {path!r} holds no valid schema of elements: {e}') from e
    if specs_of(schema) != table.columns.specs:
        raise CorruptPayload(f'the header in {path!r} names other columns than those of its schema')
    return schema
