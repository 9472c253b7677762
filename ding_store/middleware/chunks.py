"""Elements <-> entries: what a collector made becomes one self-describing chunk of columns, and back."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set

import numpy as np
from ditk import logging

from ding_store.buffer.table.narrowing import candidates, narrowed_columns, widened_columns
from ding_store.columns import NotColumnar, Schema
from ding_store.errors import ConfigError, SchemaMismatch, VersionConflict
from ding_store.middleware.pickled_chunks import add_offsets, is_pickled, pickled, unpickled, what_is_wrong
from ding_store.storage.base import Entry, EntryId, Store, Value
from ding_store.storage.encoding.framing import corrupt_entry

#: One schema per stream, agreed by the first append and checked on every other.
SCHEMA_VALUE = 'schema/{stream}'
#: In a header: names of the columns whose float32 values, all exactly k/255, travel as the bytes k.
NARROWED = 'narrowed'
#: What a chunk's rows are.
KINDS = ('trajectories', 'episodes')
#: What bytes of a stranger do to who reads them as a schema.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)


class ChunkWriter:
    """
    Overview:
        Appends lists of elements to a stream. The schema is agreed through the store: a second writer whose elements
        differ is refused before anything is sent. Large leaves of float32 travel in a quarter of their bytes for as
        long as that is exact: see ``narrowing``.
    Arguments:
        - allow_pickle (:obj:`bool`): Let a chunk of elements that no columns can hold travel pickled.
    """

    def __init__(self, store: Store, stream: str, allow_pickle: bool = False) -> None:
        self._store = store
        self._allow_pickle = allow_pickle
        self._stream = stream
        self._schema: Optional[Schema] = None
        self._text = ''
        self._narrow: Set[str] = set()  # columns that travel narrow
        self._is_wide: Set[str] = set()  # and that did, until one of their values was another

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
            - header (:obj:`dict`): JSON-able; 'rows', 'schema' and 'narrowed' are added.
            - fixups (:obj:`Optional[dict]`): Column name -> what to add to it, where the column exists.
        Raises:
            - SchemaMismatch: Naming the leaf, what was expected and what came.
            - ConfigError: The elements hold something that is no tensor, array or number.
        """
        try:
            columns = self._encode(elements) if elements else {}
        except NotColumnar:
            if not self._allow_pickle:
                raise
            marks, columns = pickled(elements, fixups or {})
            return self._store.append(self._stream, {**header, 'rows': len(elements), **marks}, columns, timeout_s)
        for name, offset in (fixups or {}).items():
            if name in columns:
                columns[name] = columns[name] + columns[name].dtype.type(offset)
        narrowed = self._narrow_in(columns)
        header = {**header, 'rows': len(elements), 'schema': self._text if elements else ''}
        if narrowed:
            header[NARROWED] = narrowed
        return self._store.append(self._stream, header, columns, timeout_s=timeout_s)

    def _encode(self, elements: Sequence[Any]) -> Dict[str, Any]:
        """Their columns; those that travel narrow may be lists of what they are made of."""
        if self._schema is not None:
            try:
                return self._schema.encode_parts(elements, self._narrow)
            except SchemaMismatch:
                pass  # perhaps only a None where a tensor was: agree on the schema that fits both, or refuse
        self._agree(Schema.infer(elements))
        assert self._schema is not None
        found = candidates(self._schema.columns(), self._schema.encode(elements[:1]))
        narrow = set(found) - self._is_wide - self._narrow
        if narrow:
            logging.info(f'ding_store: {sorted(narrow)} are all k/255 so far, and travel as bytes while they are')
        # Those that travel so already are looked at as at every chunk, so that what is said of them is said once.
        self._narrow |= narrow
        return self._schema.encode_parts(elements, self._narrow)

    def _narrow_in(self, columns: Dict[str, Any]) -> List[str]:
        """Replaces columns by the bytes that stand for them; returns which."""
        if not columns or not self._narrow:
            return []
        assert self._schema is not None
        specs, made = self._schema.columns(), narrowed_columns(columns, sorted(self._narrow))
        for name, values in made.items():
            if values is None:
                logging.info(
                    f'ding_store: {name!r} is no longer of values k/255 only, and travels as float32 from now on'
                )
                self._narrow.remove(name)
                self._is_wide.add(name)
                values = np.asarray(columns[name])
            columns[name] = values.reshape(-1, *specs[name][1])
        return sorted(self._narrow)

    def _agree(self, mine: Schema) -> None:
        name = SCHEMA_VALUE.format(stream=self._stream)
        for _ in range(100):
            value = self._store.get(name)
            agreed = self._agreed(value)
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

    @staticmethod
    def _agreed(value: Optional[Value]) -> Optional[Schema]:
        try:
            schema: Any = None if value is None else value.header.get('schema')
            return None if value is None else Schema.from_json(schema)
        except SchemaMismatch as error:
            assert value is not None
            raise SchemaMismatch(
                f'value {value.name!r} is not what a collector of this version puts there: {error}. Delete it, and '
                'give what another program puts another name'
            ) from error


class ChunkDecoder:
    """
    Overview:
        Entries back to schemas, columns and elements; parses each distinct schema once.
    Arguments:
        - allow_pickle (:obj:`bool`): Whether chunks may be pickled. Reading one runs what its writer put into it.
    """

    def __init__(self, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle
        self._schemas: Dict[str, Schema] = {}
        self._unpickled: Dict[EntryId, List[Any]] = {}  # what was checked, until its elements are asked for

    def check(self, entry: Entry) -> None:
        """
        Overview:
            Whether an entry is a chunk. Its checksum only tells that it is what somebody wrote.
        Raises:
            - CorruptPayload: It is not; names stream and entry, and what is wrong.
        """
        reason = _wrong_header(entry.header)
        try:
            if not reason and is_pickled(entry):
                reason = what_is_wrong(entry, self._allow_pickle)
                if not reason:
                    self._unpickled[entry.id] = unpickled(entry)
            elif not reason and entry.header['rows']:
                self.schema(entry).check(entry.arrays, entry.header['rows'], narrowed_in(entry))
        except SchemaMismatch as e:
            reason = str(e)
        except _MALFORMED as e:
            reason = f'its schema is malformed: {type(e).__name__}: {e}'
        if reason:
            raise corrupt_entry(entry.stream, entry.id, f'it is no chunk: {reason}', entry.writer, entry.sequence)

    def schema(self, entry: Entry) -> Schema:
        text = entry.header['schema']
        if text not in self._schemas:
            self._schemas[text] = Schema.from_json(json.loads(text))
        return self._schemas[text]

    def elements(self, entry: Entry) -> List[Any]:
        """
        Overview:
            The elements of a chunk that was checked, once; their leaves are their own memory: they outlive the entry,
            and may be written to.
        """
        if not entry.header['rows']:
            return []
        if is_pickled(entry):
            return add_offsets(self._unpickled.pop(entry.id), entry)
        narrowed = narrowed_in(entry)
        own = {name: array if name in narrowed else array.copy() for name, array in entry.arrays.items()}
        return self.schema(entry).decode(widened_columns(own, narrowed))


def narrowed_in(entry: Entry) -> List[str]:
    """Names of the columns that came narrow."""
    names: List[str] = entry.header.get(NARROWED, [])
    return names


def num_bytes(entry: Entry, as_elements: bool) -> int:
    """Of an entry's columns, or of the elements that they become; of one that was not checked, too."""
    narrowed = entry.header.get(NARROWED) if as_elements else None
    names = narrowed if isinstance(narrowed, list) else []
    return sum((4 if name in names else 1) * array.nbytes for name, array in entry.arrays.items())


def _wrong_header(header: Mapping[str, Any]) -> str:
    for name in ('rows', 'env_step', 'env_episode'):
        if not _is_count(header.get(name)):
            return f'{name} ({header.get(name)!r}) is no count'
    if header.get('kind') not in KINDS:
        return f'kind ({header.get("kind")!r}) is none of {", ".join(KINDS)}'
    if not isinstance(header.get('schema'), str):
        return 'it names no schema'
    narrowed = header.get(NARROWED, [])
    if not isinstance(narrowed, list) or not all(isinstance(name, str) for name in narrowed):
        return f'{NARROWED} ({narrowed!r}) are no names'
    if 'policy_version' in header and not _is_count(header['policy_version']):
        return f'policy_version ({header["policy_version"]!r}) is no count'
    versions = header.get('policy_versions', {})
    if not isinstance(versions, dict) or not all(map(_is_count, versions.values())):
        return 'policy_versions are no counts'
    indices, lengths = header.get('end_idx'), header.get('lengths', [])
    # DI-engine's is -1 where the first envs made no step.
    if not isinstance(indices, list) or not all(index == -1 or _is_count(index) for index in indices):
        return 'end_idx is no list of indices'
    if header['kind'] == 'episodes' and not (_are_lengths(lengths) and sum(lengths) == header['rows']):
        return f'lengths are not those of episodes of {header["rows"]} steps'
    return ''


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _are_lengths(value: Any) -> bool:
    return isinstance(value, list) and all(_is_count(length) and length for length in value)
