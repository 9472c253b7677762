"""Elements <-> entries: what a collector made becomes one self-describing chunk of columns, and back."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from ding_store.columns import Schema
from ding_store.errors import ConfigError, SchemaMismatch, VersionConflict
from ding_store.storage.base import Entry, EntryId, Store

#: One schema per stream, agreed by the first append and checked on every other.
SCHEMA_VALUE = 'schema/{stream}'


class ChunkWriter:
    """
    Overview:
        Appends lists of elements to a stream. The schema is agreed through the store: a second writer whose elements
        differ is refused before anything is sent.
    """

    def __init__(self, store: Store, stream: str) -> None:
        self._store = store
        self._stream = stream
        self._schema: Optional[Schema] = None
        self._text = ''

    def write(
        self,
        elements: Sequence[Any],
        header: Dict[str, Any],
        fixups: Optional[Dict[str, int]] = None,
        timeout_s: Optional[float] = None,
    ) -> EntryId:
        """
        Overview:
            Append one chunk; elements of one call travel together and in order.
        Arguments:
            - header (:obj:`dict`): JSON-able; 'rows' and 'schema' are added.
            - fixups (:obj:`Optional[dict]`): Column name -> what to add to it, where the column exists.
        Raises:
            - SchemaMismatch: Naming the leaf, what was expected and what came.
            - ConfigError: The elements hold something that is no tensor, array or number.
        """
        columns = self._encode(elements) if elements else {}
        for name, offset in (fixups or {}).items():
            if name in columns:
                columns[name] = columns[name] + columns[name].dtype.type(offset)
        header = {**header, 'rows': len(elements), 'schema': self._text if elements else ''}
        return self._store.append(self._stream, header, columns, timeout_s=timeout_s)

    def _encode(self, elements: Sequence[Any]) -> Dict[str, np.ndarray]:
        if self._schema is not None:
            try:
                return self._schema.encode(elements)
            except SchemaMismatch:
                pass  # perhaps only a None where a tensor was: agree on the schema that fits both, or refuse
        self._agree(Schema.infer(elements))
        assert self._schema is not None
        return self._schema.encode(elements)

    def _agree(self, mine: Schema) -> None:
        name = SCHEMA_VALUE.format(stream=self._stream)
        for _ in range(100):
            value = self._store.get(name)
            agreed = Schema.from_json(value.header['schema']) if value else None
            try:
                merged = agreed.merge(mine) if agreed else mine
            except SchemaMismatch as error:
                raise SchemaMismatch(
                    f'elements for stream {self._stream!r} differ from what its first writer agreed on: {error}'
                ) from error
            if agreed is None or merged != agreed:
                try:
                    self._store.put(name, {'schema': merged.to_json()}, {}, value.version if value else 0)
                except VersionConflict:
                    continue  # another writer was faster: look at what it agreed on
            self._schema, self._text = merged, json.dumps(merged.to_json())
            return
        raise ConfigError(f'the schema of stream {self._stream!r} keeps changing; are its writers of one pipeline?')


class ChunkDecoder:
    """Entries back to schemas, columns and elements; parses each distinct schema once."""

    def __init__(self) -> None:
        self._schemas: Dict[str, Schema] = {}

    def schema(self, entry: Entry) -> Schema:
        text = entry.header['schema']
        if text not in self._schemas:
            self._schemas[text] = Schema.from_json(json.loads(text))
        return self._schemas[text]

    def elements(self, entry: Entry) -> List[Any]:
        """
        Overview:
            The elements of a chunk, whose leaves are their own memory: they outlive the entry, and may be written to.
        """
        if not entry.header['rows']:
            return []
        return self.schema(entry).decode({name: array.copy() for name, array in entry.arrays.items()})
