"""Chunks: a collector's elements become one self-describing entry of columns, and elements again."""

from __future__ import annotations

import json
from math import prod
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set

import numpy as np
from ditk import logging

from ding_store.buffer.table.frame_references import with_wide_values
from ding_store.buffer.table.narrowing import candidates, narrowed_columns
from ding_store.columns import NotColumnar, Schema
from ding_store.columns.merge import VaryingLength
from ding_store.columns.ragged import ALL, Names
from ding_store.errors import ConfigError, SchemaMismatch, VersionConflict
from ding_store.middleware.consumer_offset import ENV_ID
from ding_store.middleware.partitions import PIECES
from ding_store.middleware.pickled_chunks import add_offsets, is_pickled, pickled, unpickled, what_is_wrong
from ding_store.middleware.ragged_chunks import check_items, lengths_in, ragged_columns, with_items
from ding_store.middleware.shared_frames import SHARED, FrameSharing, referenced_columns, shared_in
from ding_store.storage.base import Entry, EntryId, Value
from ding_store.storage.encoding.framing import corrupt_entry
from ding_store.storage.store import Store

#: Name of the value that holds a stream's schema. The first append sets it, and every other append is checked.
SCHEMA_VALUE = 'schema/{stream}'
#: Header field: names of the narrow columns. Their float32 values are all exactly k/255 and travel as the bytes k.
NARROWED = 'narrowed'
#: Kinds of rows in a chunk.
KINDS = ('trajectories', 'episodes')
#: Errors that a malformed schema may raise while it is parsed.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)


class ChunkWriter:
    """
    Overview:
        Appends lists of elements to a stream. The stream's schema is a value in the store. If a writer's elements do
        not fit it, the writer fails before it sends anything. Large float32 leaves travel in a quarter of their bytes
        while that is exact, see ``narrowing``. Frames that recur in a chunk travel once, see ``shared_frames``.
    Arguments:
        - allow_pickle (:obj:`bool`): Pickle chunks of elements that columns cannot hold.
        - share_frames (:obj:`bool`): Whether frames may travel once.
    Attributes:
        - ragged (:obj:`Names`): Leaves whose first dimension varies, see ``StoreBuffer``. Chunks with such leaves
          travel as they are: none of their leaves is narrowed, and their frames are not shared.
    """

    def __init__(self, store: Store, stream: str, allow_pickle: bool = False, share_frames: bool = True) -> None:
        self.ragged: Names = ()
        self._store = store
        self._allow_pickle = allow_pickle
        self._frame_sharing = FrameSharing() if share_frames else None
        self._stream = stream
        self._schema: Optional[Schema] = None
        self._text = ''
        self._narrow: Set[str] = set()  # columns that travel narrow
        self._is_wide: Set[str] = set()  # columns that travelled narrow until a value was not k/255

    def write(
        self,
        elements: Sequence[Any],
        header: Dict[str, Any],
        fixups: Optional[Dict[str, int]] = None,
        timeout_s: Optional[float] = None,
    ) -> EntryId:
        """
        Overview:
            Append one chunk. Its elements travel together and in order.
        Arguments:
            - header (:obj:`dict`): Fields for JSON. ``write`` adds 'rows', 'schema', 'narrowed' and 'shared'.
            - fixups (:obj:`Optional[dict]`): Column name -> number to add to the column, if it exists.
        Raises:
            - SchemaMismatch: The elements do not fit the stream's schema. The error names the leaf.
            - NotColumnar: Columns cannot hold the elements, and ``allow_pickle`` is off.
            - ConfigError: The stream's schema keeps changing.
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
        is_ragged = bool(self._schema is not None and self._schema.ragged)
        narrowed = [] if is_ragged else self._narrow_in(columns)
        header = {**header, 'rows': len(elements), 'schema': self._text if elements else ''}
        if narrowed:
            header[NARROWED] = narrowed
        shared = {} if self._frame_sharing is None or is_ragged else self._frame_sharing.share(columns)
        if shared:
            header[SHARED] = shared
        return self._store.append(self._stream, header, columns, timeout_s=timeout_s)

    def _encode(self, elements: Sequence[Any]) -> Dict[str, Any]:
        """Return the elements' columns. Those that travel narrow may be lists of their parts."""
        if self._schema is not None:
            try:
                return self._encode_known(self._schema, elements)
            except SchemaMismatch:
                pass  # perhaps a None in place of a tensor: agree on a schema that fits both, or fail
        try:
            self._agree(Schema.infer(elements, ragged=self._ragged_in(elements), may_lack=True))
        except SchemaMismatch as error:
            varying = error.__cause__ or error
            if not isinstance(varying, VaryingLength):
                raise
            raise SchemaMismatch(f'{error}. {self._advice(varying.path)}') from error
        assert self._schema is not None
        if self._schema.ragged:
            return self._encode_known(self._schema, elements)
        found = candidates(self._schema.columns(), self._schema.encode(elements[:1]))
        narrow = set(found) - self._is_wide - self._narrow
        if narrow:
            logging.info(f'ding_store: {sorted(narrow)} hold only values k/255, and travel as bytes until one does not')
        # Narrow columns are checked with every chunk in _narrow_in, so only new ones are logged here.
        self._narrow |= narrow
        return self._encode_known(self._schema, elements)

    def _ragged_in(self, elements: Sequence[Any]) -> Names:
        """Return the ragged leaves of elements. The env's id is none: readers tell episodes apart by it."""
        names = Schema.infer(elements, ragged=ALL).ragged if self.ragged == ALL else self.ragged
        return [name for name in names if name != ENV_ID]

    def _advice(self, name: str) -> str:
        """Return what to do about a leaf whose length varies."""
        if self.ragged == ALL or name in self.ragged:
            return 'The run has chunks in which it did not vary yet: name another run with --run NAME.'
        return (
            f'If its first dimension varies, set policy.other.replay_buffer.ragged=[{name!r}]. Make the replay by '
            'parts.replay(cfg) in every process. A pipeline without a replay needs leaves of one shape: pad them.'
        )

    def _encode_known(self, schema: Schema, elements: Sequence[Any]) -> Dict[str, Any]:
        if schema.ragged:
            return with_items(schema, *schema.encode_ragged(elements))
        return schema.encode_parts(elements, self._narrow)

    def _narrow_in(self, columns: Dict[str, Any]) -> List[str]:
        """Replace narrow columns by their bytes, and return the columns' names."""
        if not columns or not self._narrow:
            return []
        assert self._schema is not None
        specs, made = self._schema.columns(), narrowed_columns(columns, sorted(self._narrow))
        for name, values in made.items():
            if values is None:
                logging.info(f'ding_store: {name!r} has a value that is not k/255, and travels as float32 from now on')
                self._narrow.remove(name)
                self._is_wide.add(name)
                values = np.asarray(columns[name])
            columns[name] = values.reshape(-1, *specs[name][1])
        return sorted(self._narrow)

    def _agree(self, mine: Schema) -> None:
        """Merge a schema into the stream's by compare-and-set, and use the result."""
        name = SCHEMA_VALUE.format(stream=self._stream)
        for _ in range(100):
            value = self._store.get(name)
            agreed = self._agreed(value)
            try:
                merged = agreed.merge(mine) if agreed else mine
            except SchemaMismatch as error:
                raise SchemaMismatch(
                    f'elements for stream {self._stream!r} do not fit the schema of its earlier writers: {error}'
                ) from error
            if agreed is None or merged != agreed:
                try:
                    self._store.put(name, {'schema': merged.to_json()}, {}, value.version if value else 0)
                except VersionConflict:
                    continue  # another writer was first: merge with its schema
            self._schema, self._text = merged, json.dumps(merged.to_json())
            return
        raise ConfigError(
            f'the schema of stream {self._stream!r} keeps changing. Use the same pipeline in all of its writers.'
        )

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
        Decodes entries into schemas, columns and elements. It parses each distinct schema once.
    Arguments:
        - allow_pickle (:obj:`bool`): Accept pickled chunks. Reading one runs code that its writer chose.
    """

    def __init__(self, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle
        self._schemas: Dict[str, Schema] = {}
        self._unpickled: Dict[EntryId, List[Any]] = {}  # from ``check`` until ``elements`` is called

    def check(self, entry: Entry) -> None:
        """
        Overview:
            Check that an entry is a chunk. Its checksum only shows that the bytes are those that were written.
        Raises:
            - CorruptPayload: It is not a chunk. The error names the stream, the entry and the reason.
        """
        reason = _wrong_header(entry.header)
        try:
            if not reason and is_pickled(entry):
                reason = what_is_wrong(entry, self._allow_pickle)
                if not reason:
                    self._unpickled[entry.id] = unpickled(entry)
            elif not reason and entry.header['rows']:
                schema = self.schema(entry)
                schema.check(self.columns(entry), entry.header['rows'], narrowed_in(entry))
                if schema.ragged:
                    check_items(entry, schema)
        except SchemaMismatch as e:
            reason = str(e)
        except _MALFORMED as e:
            reason = f'its schema is malformed: {type(e).__name__}: {e}'
        if reason:
            raise corrupt_entry(entry.stream, entry.id, f'it is not a chunk: {reason}', entry.writer, entry.sequence)

    def schema(self, entry: Entry) -> Schema:
        text = entry.header['schema']
        if text not in self._schemas:
            self._schemas[text] = Schema.from_json(json.loads(text))
        return self._schemas[text]

    def columns(self, entry: Entry) -> Dict[str, Any]:
        """
        Return the columns of a chunk, with ``FrameReferences`` for those whose frames were sent once, and with the
        lengths of ragged leaves.
        """
        if self.schema(entry).ragged:
            return lengths_in(entry)
        if not shared_in(entry):
            return dict(entry.arrays)
        return referenced_columns(entry, self.schema(entry).columns())

    def elements(self, entry: Entry) -> List[Any]:
        """
        Overview:
            Return the elements of a chunk. Call ``check`` first, and this once. The leaves are copies, so they outlive
            the entry and may be written to.
        """
        if not entry.header['rows']:
            return []
        if is_pickled(entry):
            return add_offsets(self._unpickled.pop(entry.id), entry)
        schema = self.schema(entry)
        if schema.ragged:
            return schema.decode(ragged_columns(entry, schema))
        narrowed = narrowed_in(entry)
        copied = {*narrowed, *shared_in(entry)}
        own = {name: each if name in copied else each.copy() for name, each in self.columns(entry).items()}
        return schema.decode(with_wide_values(own, narrowed))


def narrowed_in(entry: Entry) -> List[str]:
    """Return the names of an entry's narrow columns."""
    names: List[str] = entry.header.get(NARROWED, [])
    return names


def num_bytes(entry: Entry, as_elements: bool) -> int:
    """Return the bytes of an entry's columns, or of the elements made from them. The entry need not be checked."""
    if not as_elements:
        return sum(array.nbytes for array in entry.arrays.values())
    narrowed, shared = entry.header.get(NARROWED), entry.header.get(SHARED)
    names = narrowed if isinstance(narrowed, list) else []
    places = shared if isinstance(shared, dict) else {}
    total = 0
    for name, array in entry.arrays.items():
        if name in places.values():
            continue  # The elements have these frames.
        frames = entry.arrays.get(str(places.get(name)))
        size = array.nbytes if frames is None else array.size * frames.itemsize * prod(frames.shape[1:])
        total += (4 if name in names else 1) * size
    return total


def meta_of(entries: List[Entry]) -> Optional[Dict[str, int]]:
    """
    Return the meta of these chunks' rows: the oldest version of the acting policy that collected them. A process with
    several policies adds a version for each: ``policy_version/NAME``.
    """
    found: Dict[str, int] = {}
    for header in (entry.header for entry in entries):
        versions = {'policy_version': header['policy_version']} if 'policy_version' in header else {}
        several = header.get('policy_versions', {})
        if len(several) > 1:
            versions.update({f'policy_version/{name}': version for name, version in several.items()})
        for key, version in versions.items():
            found[key] = min(version, found.get(key, version))
    return found or None


def _wrong_header(header: Mapping[str, Any]) -> str:
    """Return why a header is not that of a chunk, or '' if it is."""
    for name in ('rows', 'env_step', 'env_episode'):
        if not _is_count(header.get(name)):
            return f'{name} ({header.get(name)!r}) is not a count'
    if header.get('kind') not in KINDS:
        return f'kind ({header.get("kind")!r}) is not one of {", ".join(KINDS)}'
    if not isinstance(header.get('schema'), str):
        return 'it has no schema'
    narrowed = header.get(NARROWED, [])
    if not isinstance(narrowed, list) or not all(isinstance(name, str) for name in narrowed):
        return f'{NARROWED} ({narrowed!r}) is not a list of names'
    shared = header.get(SHARED, {})
    if not isinstance(shared, dict) or not all(isinstance(place, str) for place in shared.values()):
        return f'{SHARED} ({shared!r}) does not map names to names'
    if 'policy_version' in header and not _is_count(header['policy_version']):
        return f'policy_version ({header["policy_version"]!r}) is not a count'
    versions = header.get('policy_versions', {})
    if not isinstance(versions, dict) or not all(map(_is_count, versions.values())):
        return 'policy_versions are not counts'
    pieces: Any = header.get(PIECES, [])
    if PIECES in header and not (_are_pieces(pieces) and sum(count for count, _ in pieces) == header['rows']):
        return f'{PIECES} are not those of {header["rows"]} steps'
    indices, lengths = header.get('end_idx'), header.get('lengths', [])
    # DI-engine writes -1 if the first envs made no step.
    if not isinstance(indices, list) or not all(index == -1 or _is_count(index) for index in indices):
        return 'end_idx is not a list of indices'
    if header['kind'] == 'episodes' and not (_are_lengths(lengths) and sum(lengths) == header['rows']):
        return f'lengths are not those of episodes of {header["rows"]} steps'
    return ''


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _are_lengths(value: Any) -> bool:
    return isinstance(value, list) and all(_is_count(length) and length for length in value)


def _are_pieces(value: Any) -> bool:
    pairs = value if isinstance(value, list) else [None]
    return all(isinstance(each, list) and len(each) == 2 and all(map(_is_count, each)) for each in pairs)
