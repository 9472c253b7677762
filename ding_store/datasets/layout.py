"""The layout of a segment's rows: all columns of a row lie together, so that one read of the disk gets a row."""

from __future__ import annotations

from typing import Any, Collection, Dict, Iterable, Mapping, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.table.frame_references import FrameReferences
from ding_store.buffer.table.narrowing import stored_specs, widen, widened_columns
from ding_store.buffer.table.specs import spec_bytes
from ding_store.columns import Schema
from ding_store.errors import CorruptPayload, FormatMismatch, SchemaMismatch

#: Versions of the format of a segment: without and with ragged leaves. Readers refuse other versions.
FORMAT, RAGGED_FORMAT = 1, 2
#: Name of the column with the place of a ragged leaf's items in the file of items. No leaf has such a name.
_AT = '~at/{name}'
#: A row begins at a multiple of this many bytes, which is the alignment that every column needs.
_ALIGNMENT = 8


def are_alike(one: Schema, other: Schema) -> bool:
    """
    Return whether elements of both schemas have the same columns. The order of their keys may differ: that of a tree is
    another in each process.
    """
    if one == other or one.columns() != other.columns():
        return one == other
    try:
        return one.merge(other) == one
    except SchemaMismatch:
        return False


class Layout:
    """
    Overview:
        The place of each column in a row. The columns follow each other by decreasing alignment, and the row ends at a
        multiple of 8 bytes. The column of a ragged leaf has its lengths, and another one the places of its items, which
        are in a file of their own.
    Arguments:
        - schema (:obj:`Schema`): The elements.
        - narrow (:obj:`Collection[str]`): Columns of float32 values k/255 that are stored as the bytes k.
    """

    def __init__(self, schema: Schema, narrow: Collection[str] = ()) -> None:
        self.schema, self.narrow = schema, frozenset(narrow)
        places = {_AT.format(name=name): (np.dtype(np.int64), ()) for name in schema.ragged}
        specs = {**stored_specs(schema.columns(), narrow), **places}
        ordered = sorted(specs, key=lambda name: -specs[name][0].alignment)
        offset, offsets = 0, []
        for name in ordered:
            dtype, shape = specs[name]
            offsets.append(offset)
            offset += dtype.itemsize * int(np.prod(shape))
        self.row_bytes = max(_ALIGNMENT, -(-offset // _ALIGNMENT) * _ALIGNMENT)
        # Numpy renames a field without a name, and a schema may have such a column.
        self._fields = {name: f'c{i}' for i, name in enumerate(ordered)}
        #: One row as a numpy type.
        self.record: np.dtype[Any] = np.dtype(
            {
                'names': list(self._fields.values()),
                'formats': [specs[name] for name in ordered],
                'offsets': offsets,
                'itemsize': self.row_bytes,
            }
        )
        self._places = {name: (at, spec_bytes(specs[name])) for name, at in zip(ordered, offsets)}
        self._columns = [[name, specs[name][0].str, list(specs[name][1]), at] for name, at in zip(ordered, offsets)]

    def places_of(self, names: Iterable[str]) -> Tuple[Array, Array]:
        """Return the offsets and the sizes in bytes of these columns in a row."""
        offsets, sizes = np.array([self._places[name] for name in names], np.int64).reshape(-1, 2).T.copy()
        return offsets, sizes

    def fits(self, schema: Schema, narrowed: Collection[str]) -> bool:
        """Return whether rows of this schema can be encoded. A row of bytes fits where floats are stored."""
        return are_alike(self.schema, schema) and self.narrow <= set(narrowed)

    def encode(
        self, columns: Mapping[str, Any], num_rows: int, narrowed: Collection[str] = (), items_at: int = 0
    ) -> Array:
        """
        Overview:
            Return the rows ``(num_rows,)`` of these columns.
        Arguments:
            - columns (:obj:`Mapping`): Name -> array or ``FrameReferences``, as the schema encodes them.
            - narrowed (:obj:`Collection[str]`): Columns that are passed as bytes.
            - items_at (:obj:`int`): Where the items of these rows begin in the file of items, leaf after leaf.
        """
        if self.schema.ragged:
            columns = {**columns, **self._items_at(columns, items_at)}
        records = np.zeros(num_rows, self.record)  # zeros between the columns, so that equal rows have equal bytes
        for name, field in self._fields.items():
            values = columns[name]
            if name in narrowed and name not in self.narrow:
                is_referenced = isinstance(values, FrameReferences)
                values = values.widened() if is_referenced else widened_columns(columns, [name])[name]
            records[field] = np.asarray(values)
        return records

    def _items_at(self, columns: Mapping[str, Any], begin: int) -> Dict[str, Array]:
        """Return where the items of each row are, given where those of the first leaf's first row are."""
        made = {}
        for name, (dtype, shape) in self.schema.ragged.items():
            sizes = columns[name] * (dtype.itemsize * int(np.prod(shape)))
            ends = begin + np.cumsum(sizes)
            made[_AT.format(name=name)] = ends - sizes
            begin = int(ends[-1]) if len(ends) else begin
        return made

    def items_at(self, records: Array, name: str) -> Array:
        """Return where the items of a ragged leaf of these rows are in the file of items."""
        found: Array = records[self._fields[_AT.format(name=name)]]
        return found

    def decode_into(self, records: Array, columns: Mapping[str, Array]) -> None:
        """Write the columns of these rows to arrays ``(n, *shape)``. Bytes become floats."""
        for name, out in columns.items():
            part = records[self._fields[name]]
            if name in self.narrow:
                widen(part, out)
            else:
                out[...] = part

    def column(self, records: Array, name: str) -> Array:
        """Return one column of these rows, as a view if it is not stored as bytes."""
        part: Array = records[self._fields[name]]
        if name not in self.narrow:
            return part
        out = np.empty(part.shape, np.float32)
        widen(np.array(part), out)
        return out

    def empty(self, num_rows: int) -> Dict[str, Array]:
        """Return arrays for ``decode_into``."""
        return {name: np.empty((num_rows, *shape), dtype) for name, (dtype, shape) in self.schema.columns().items()}

    def to_json(self) -> Dict[str, Any]:
        return {
            'format': RAGGED_FORMAT if self.schema.ragged else FORMAT,
            'schema': self.schema.to_json(),
            'narrow': sorted(self.narrow),
            'columns': self._columns,
            'row_bytes': self.row_bytes,
        }

    @classmethod
    def from_json(cls, data: Any, path: str) -> Layout:
        """
        Overview:
            Return the layout that ``to_json`` wrote.
        Arguments:
            - path (:obj:`str`): The file, for the errors.
        Raises:
            - FormatMismatch: Another version of ding_store wrote it.
            - CorruptPayload: It is no layout.
        """
        if not isinstance(data, dict) or not isinstance(data.get('format'), int):
            raise CorruptPayload(f'{path!r} does not begin with the header of a segment')
        if data['format'] not in (FORMAT, RAGGED_FORMAT):
            raise FormatMismatch(
                f'{path!r} has format {data["format"]}, but this ding_store reads formats {FORMAT} and '
                f'{RAGGED_FORMAT}. Read it with the version of ding_store that wrote it.'
            )
        try:
            layout = cls(Schema.from_json(data['schema']), data['narrow'])
        except (KeyError, TypeError, ValueError, SchemaMismatch) as error:
            raise CorruptPayload(f'{path!r} has a damaged header: {error!r}') from error
        if layout.to_json() != data:
            raise CorruptPayload(f'{path!r} has a damaged header: its columns are not those of its schema')
        return layout
