"""
The present format of a saved buffer, its writer and its reader.

    magic, length of the header (8 bytes, little endian), header (JSON: version, schema, columns, frames of columns)
    blocks: row numbers and contents of some rows, see ``save_blocks``
    the row numbers of all valid rows, oldest first; each is in one or more blocks, of which the last is valid
    pickled extras (metas, and elements that are Python objects)
    index (JSON: rows and bytes of each block, the sizes of the other parts, checksums of all, breaks of sequences, the
        counts of the buffer's limiter if it has one), its length and checksum, magic

Other threads may write to the buffer during a save. The writer first saves all rows. It then saves the rows that came
or changed meanwhile, until few are left. It saves these while other writers wait. The file therefore holds the contents
of one moment, the last.
"""

from __future__ import annotations

import json
import os
import pickle
import zlib
from math import prod
from typing import IO, Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.elements import Elements
from ding_store.buffer.elements.packets import Packet
from ding_store.buffer.elements.save_blocks import BLOCK_BYTES, Blocks
from ding_store.buffer.persistence.table_header import REFERENCE
from ding_store.buffer.sequences.breaks import Break, as_breaks
from ding_store.buffer.table.encodings import columns_by_pool
from ding_store.buffer.table.specs import ColumnSpec, spec_bytes
from ding_store.errors import CorruptPayload, FormatMismatch
from ding_store.storage.encoding.checksum import checksum

#: A save with columns that share frames has the second version, and any other save the first.
VERSION, VERSION_OF_FRAMES = 4, 5
_END = b'ding_store end\n\n'

#: Save the last rows under the write lock when they take at most this many bytes, or after this many rounds.
FEW_BYTES = 32 << 20
_ROUNDS = 4

Metas = List[Tuple[int, Dict[Any, Any]]]


class Contents(NamedTuple):
    """
    The contents outside of blocks: row numbers by age, objects, (position, meta) of metas that are not empty, and
    breaks.
    """

    rows: Array
    objects: Optional[List[Any]]
    metas: Metas
    next_row: int
    breaks: List[Break]


def contents(elements: Elements) -> Contents:
    """Collect the contents outside of blocks. The caller holds the table's lock."""
    table = elements.table
    with table.index.lock:
        slots = table.index.slots_by_age().astype(np.intp)
        rows = table.index.row_of_slot[slots]
    table.check_unchanged()
    objects = elements.store.objects(slots)
    breaks = elements.sequences.breaks.list()
    if not elements.metas.is_used:
        return Contents(rows, objects, [], table.next_row, breaks)
    metas = [(place, dict(elements.metas.peek(slot))) for place, slot in enumerate(slots.tolist())]
    return Contents(rows, objects, [(place, meta) for place, meta in metas if meta], table.next_row, breaks)


class SaveWriter:
    """
    Overview:
        Writes one save. ``write`` returns with the file positioned at its end. The file is not synced yet.
    """

    def __init__(
        self, file: IO[bytes], elements: Elements, counts: Optional[Callable[[], Dict[str, int]]] = None
    ) -> None:
        self._file, self._elements, self._table = file, elements, elements.table
        self._counts = counts
        self._blocks: Blocks
        self._header_checksum = 0
        self._saved = np.empty(0, np.int64)

    def write(self) -> None:
        start = self._file.tell()
        with self._table.watching() as changed:
            form = self._form()
            self._begin(start)
            for _ in range(_ROUNDS):
                rows = self._unsaved(changed)
                if self._blocks.num_bytes(rows) <= FEW_BYTES:
                    break
                self._write_rows(rows)
            with self._table.write_lock:
                if self._form() != form:
                    # The layout changed, or columns became objects: start again, once.
                    changed.clear()
                    self._begin(start)
                self._write_rows(self._unsaved(changed))
                kept = contents(self._elements)
                counts = None if self._counts is None else self._counts()
        self._write_rest(kept, counts)

    def _form(self) -> Tuple[Any, ...]:
        """
        Return the narrow columns, those that share frames, and the store, which is another when the schema or all rows
        are replaced.
        """
        columns = self._table.columns
        return columns.narrow, frozenset(columns.shared), self._elements.store

    def _begin(self, start: int) -> None:
        store = self._elements.store
        self._blocks = store.blocks(self._file, lambda: self._elements.store is store)
        schema, has_columns = store.schema, store.schema is not None and not self._blocks.is_packed
        columns = self._table.columns.stored_columns() if has_columns else []
        groups = [] if not has_columns else columns_by_pool(self._table.columns.current)
        frames = [[next(iter(group.values())).frame_shape, list(group)] for group in groups]
        header: Dict[str, Any] = {
            'version': VERSION_OF_FRAMES if frames else VERSION,
            'schema': None if schema is None else schema.to_json(),
            'columns': [(each.name, each.dtype, each.shape) for each in columns],
            'narrow': sorted(self._table.columns.narrow),
            'packed': self._blocks.is_packed,
        }
        if frames:
            header['frames'] = frames
        encoded = json.dumps(header).encode()
        self._header_checksum = zlib.crc32(encoded)
        self._file.seek(start)
        self._file.truncate()
        self._file.write(len(encoded).to_bytes(8, 'little') + encoded)
        self._saved = np.empty(0, np.int64)

    def _unsaved(self, changed: List[Array]) -> Array:
        """Return the live rows that are not in the file, or changed after they were written."""
        # Writers append to ``changed`` meanwhile. They hold the index lock from then until the change is complete.
        taken = changed[:]
        del changed[: len(taken)]
        stale = np.concatenate([*taken, np.empty(0, np.int64)])
        if len(stale):
            self._saved = np.setdiff1d(self._saved, stale)
        return np.setdiff1d(self._table.rows_by_age(), self._saved)

    def _write_rows(self, rows: Array) -> None:
        self._saved = np.union1d(self._saved, self._blocks.write(rows))

    def _write_rest(self, kept: Contents, counts: Optional[Dict[str, int]]) -> None:
        self._file.write(kept.rows.tobytes())
        start = self._file.tell()
        extras = _Summed(self._file)
        pickle.dump((kept.metas, kept.objects), extras, protocol=4)
        index = {
            'blocks': self._blocks.lengths,
            'block_bytes': self._blocks.sizes,
            'num_rows': len(kept.rows),
            'next_row': kept.next_row,
            'breaks': kept.breaks,
            'num_extra_bytes': self._file.tell() - start,
            'checksums': {
                'header': self._header_checksum,
                'blocks': self._blocks.checksums,
                'rows': zlib.crc32(kept.rows.tobytes()),
                'extras': extras.checksum,
            },
        }
        if self._blocks.num_frames:
            index['block_frames'] = self._blocks.num_frames
        if counts is not None:
            index['limiter'] = counts
        encoded = json.dumps(index).encode()
        self._file.write(
            encoded + len(encoded).to_bytes(8, 'little') + zlib.crc32(encoded).to_bytes(4, 'little') + _END
        )


class _Extras(pickle.Unpickler):
    """An unpickler that reports a class that cannot be imported differently from a damaged file."""

    def __init__(self, file: IO[bytes], file_name: str) -> None:
        super().__init__(file)
        self._name = file_name

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError) as e:
            raise FormatMismatch(f'{self._name!r} holds a {module}.{name}, which cannot be imported here: {e}') from e


def load_extras(file: IO[bytes], file_name: str) -> Any:
    """
    Overview:
        Load pickled extras. The file is trusted, like the hickle files of DequeBuffer.
    Raises:
        - FormatMismatch: A class in the extras cannot be imported.
    """
    return _Extras(file, file_name).load()


class _Summed:
    """A file for writing that computes the crc32 of its bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.checksum = file, 0

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return self._file.write(data)


class Save:
    """
    Overview:
        Reads a file of ``SaveWriter``, after its header. The contents are not trusted before ``verify``.
    Arguments:
        - header (:obj:`bytes`): The header as read.
    Raises:
        - CorruptPayload: The file is truncated or damaged.
    """

    def __init__(self, file: IO[bytes], header: bytes, file_name: str) -> None:
        self._file, self._start, self._name = file, file.tell(), file_name
        index = self._read_index()
        self._checksums: Dict[str, Any] = index['checksums']
        self._demand('header', zlib.crc32(header))
        fields = json.loads(header)
        self.schema = fields['schema']
        self.specs: Dict[str, ColumnSpec] = {
            name: (np.dtype(dtype), tuple(shape)) for name, dtype, shape in fields['columns']
        }
        #: Columns that are stored as bytes, see ``narrowing``.
        self.narrow: Optional[List[str]] = fields['narrow']
        self._frames = SavedFrames(self.specs, fields.get('frames', []), index)
        #: Bytes of a row in a block, by column.
        self._widths = {name: spec_bytes(spec) for name, spec in {**self.specs, **self._frames.references}.items()}
        self.next_row = index['next_row']
        if type(self.next_row) is not int or not 0 <= self.next_row < 1 << 63:
            raise CorruptPayload(f'{file_name!r} is damaged: its next row is {self.next_row!r:.80}')
        #: Counts of the saved buffer's limiter, or None if it had none.
        self.counts: Optional[Dict[str, int]] = index.get('limiter')
        self.breaks: List[Break] = as_breaks(index.get('breaks', []))
        self._num_extra_bytes = index['num_extra_bytes']
        self._lengths = np.array(index['blocks'], np.int64)
        block_bytes = self._block_bytes(index)
        self._offsets = self._start + np.concatenate([[0], np.cumsum(block_bytes)]).astype(np.int64)
        self._extras = int(self._offsets[-1]) + 8 * index['num_rows']
        if self._extras + self._num_extra_bytes != self._index_start:
            raise CorruptPayload(f'{file_name!r} is damaged: the lengths of its parts differ from its index')
        file.seek(self._offsets[-1])
        rows = file.read(8 * index['num_rows'])
        self._demand('rows', zlib.crc32(rows))
        self.rows = np.frombuffer(rows, np.int64)

    is_packed = False

    def verify(self) -> None:
        """
        Overview:
            Read the whole file once, and compare its checksums.
        Raises:
            - CorruptPayload: A checksum is wrong.
        """
        self._file.seek(self._extras)
        self._demand('extras', self._checksum_of_extras())
        self._verify_blocks(self._checksums['blocks'])
        places = self._places()
        if (np.diff(self.rows) <= 0).any() or (len(self.rows) and not 0 <= self.rows[-1] < self.next_row):
            raise CorruptPayload(f'{self._name!r} is damaged: its row numbers do not grow')
        if (self.specs or self.is_packed) and len(places) != len(self.rows):
            raise CorruptPayload(f'{self._name!r} is damaged: rows are missing in its blocks')

    def extras(self) -> Any:
        self._file.seek(self._extras)
        return load_extras(self._file, self._name)

    def read(self, skipped: int, chunk_bytes: int) -> Iterator[Dict[str, Array]]:
        """
        Yield the columns of the rows after the first ``skipped``, in chunks, in the form in which they are stored.
        """
        step = max(1, chunk_bytes // max(1, sum(map(spec_bytes, self.specs.values()))))
        places = self._places()[skipped:]
        # Split the rows into runs that are consecutive in one block.
        blocks = np.searchsorted(np.cumsum(self._lengths), places, side='right')
        breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(blocks) != 0)) + 1
        starts, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(places)]
        firsts = np.concatenate([[0], np.cumsum(self._lengths)])
        for start, end in zip(starts, ends):
            for first in range(start, end, step):
                block = int(blocks[first])
                yield self._read_part(block, int(places[first] - firsts[block]), min(step, end - first))

    def _block_bytes(self, index: Dict[str, Any]) -> Array:
        return self._lengths * (8 + sum(self._widths.values())) + self._frames.num_bytes(len(self._lengths))

    def _verify_blocks(self, checksums: List[int]) -> None:
        block_bytes = np.diff(self._offsets)
        scratch = np.empty(int(block_bytes.max(initial=0)), np.uint8).data
        self._file.seek(self._start)
        for number, num_bytes in enumerate(block_bytes.tolist()):
            found = self._file.readinto(scratch[:num_bytes])  # type: ignore[attr-defined]
            self._demand_block(number, checksum([scratch[:found]], num_bytes), checksums)

    def _demand_block(self, number: int, found: int, checksums: List[int]) -> None:
        if found != checksums[number]:
            raise CorruptPayload(f'{self._name!r} is damaged: the checksum of its block {number} is wrong')

    def _places(self) -> Array:
        """Return the position of each valid row among the rows of all blocks. The last position of a row is valid."""
        parts = []
        for offset, length in zip(self._offsets, self._lengths):
            self._file.seek(offset)
            parts.append(np.frombuffer(self._file.read(8 * length), np.int64))
        written = np.concatenate([*parts, np.empty(0, np.int64)])
        rows, places = np.unique(written[::-1], return_index=True)
        found: Array = len(written) - 1 - places[np.isin(rows, self.rows, assume_unique=True)]
        return found

    def _read_part(self, block: int, first: int, count: int) -> Dict[str, Array]:
        length = int(self._lengths[block])
        place = int(self._offsets[block]) + 8 * length
        columns = {}
        for name, spec in self.specs.items():
            dtype, shape = self._frames.references.get(name, spec)
            self._file.seek(place + first * self._widths[name])
            data = self._file.read(count * self._widths[name])
            columns[name] = np.frombuffer(data, dtype).reshape((count, *shape))
            place += length * self._widths[name]
        if self._frames.references:
            if self._frames.block != block:
                self._file.seek(place)
                self._frames.read(self._file, block)
            try:
                columns.update(self._frames.values_of(columns))
            except IndexError as e:
                raise CorruptPayload(f'{self._name!r} is damaged: a row refers to a frame that is missing') from e
        return columns

    def _checksum_of_extras(self) -> int:
        crc, left = 0, self._num_extra_bytes
        while left > 0:
            data = self._file.read(min(left, BLOCK_BYTES))
            crc, left = zlib.crc32(data, crc), left - (len(data) or left)
        return crc

    def _demand(self, part: str, found: int) -> None:
        if found != self._checksums[part]:
            raise CorruptPayload(f'{self._name!r} is damaged: the checksum of its {part} is wrong')

    def _read_index(self) -> Dict[str, Any]:
        size = os.fstat(self._file.fileno()).st_size
        tail = 12 + len(_END)
        self._file.seek(max(self._start, size - tail))
        data = self._file.read()
        length = int.from_bytes(data[:8], 'little')
        self._index_start = size - tail - length
        if data[12:] != _END or self._index_start < self._start:
            raise CorruptPayload(f'{self._name!r} is truncated: its end mark is missing')
        self._file.seek(self._index_start)
        encoded = self._file.read(length)
        if zlib.crc32(encoded).to_bytes(4, 'little') != data[8:12]:
            raise CorruptPayload(f'{self._name!r} is damaged: the checksum of its index is wrong')
        index: Dict[str, Any] = json.loads(encoded)
        return index


class SavedFrames:
    """
    Overview:
        The frames of the blocks of a save. Those of one block are in memory.
    Arguments:
        - specs (:obj:`Mapping`): dtype and shape of the values of all columns.
        - described (:obj:`Any`): For each pool the shape of a frame, and the columns that have such frames.
        - index (:obj:`Mapping`): The index of the save.
    Raises:
        - ValueError, TypeError, KeyError: The description does not fit the columns.
    """

    def __init__(self, specs: Mapping[str, ColumnSpec], described: Any, index: Mapping[str, Any]) -> None:
        self._specs = specs
        #: Per pool the spec of a frame, and per column the position of its pool and the spec of its references.
        self._frame_specs: List[ColumnSpec] = []
        self._pool_of: Dict[str, int] = {}
        self.references: Dict[str, ColumnSpec] = {}
        for number, (frame_shape, names) in enumerate(described):
            for name in names:
                dtype, shape = specs[name]
                num_axes = len(shape) - len(frame_shape)
                is_fit = num_axes >= 0 and list(shape[num_axes:]) == frame_shape and prod(shape) > 0
                if not is_fit or dtype != specs[names[0]][0]:
                    raise ValueError(f'values of shape {shape} do not consist of frames of shape {frame_shape}')
                self.references[name] = REFERENCE, (prod(shape[:num_axes]),)
                self._pool_of[name] = number
            self._frame_specs.append((specs[names[0]][0], tuple(frame_shape)))
        #: The number of frames per block and pool.
        self._num_frames = np.array(index['block_frames'] if described and index['blocks'] else [], np.int64)
        if (self._num_frames < 0).any():
            raise ValueError('a number of frames is negative')
        #: The block whose frames are in memory.
        self.block = -1
        self._frames: List[Array] = []

    def num_bytes(self, num_blocks: int) -> Array:
        """Return the bytes of the frames of each block."""
        sizes = np.array([spec_bytes(spec) for spec in self._frame_specs], np.int64)
        return self._num_frames.reshape(num_blocks, len(sizes)) @ sizes

    def read(self, file: IO[bytes], block: int) -> None:
        """Read the frames of a block, at which the file is positioned."""
        self.block, self._frames = block, []
        for number, (dtype, shape) in zip(self._num_frames[block].tolist(), self._frame_specs):
            data = file.read(number * spec_bytes((dtype, shape)))
            self._frames.append(np.frombuffer(data, dtype).reshape(number, *shape))

    def values_of(self, columns: Mapping[str, Array]) -> Dict[str, Array]:
        """Return the values of those columns that are references. Raises IndexError if a frame is missing."""
        values = {}
        for name, number in self._pool_of.items():
            references = columns[name]
            # A negative number is too large then.
            frames = self._frames[number][references.reshape(-1).view(np.uint32)]
            values[name] = frames.reshape(len(references), *self._specs[name][1])
        return values


class PackedSave(Save):
    """A save with packets instead of columns, see ``PacketBlocks``."""

    is_packed = True

    def packets(self, skipped: int = 0) -> Iterator[Packet]:
        """
        Overview:
            Yield the packets of the rows after the first ``skipped``.
        Raises:
            - CorruptPayload: A packet is damaged.
        """
        if not len(self._lengths):
            return
        heads = [self._head(number) for number in range(len(self._lengths))]
        starts = [
            offset + 24 * len(head[1]) + np.cumsum(head[1]) - head[1] for offset, head in zip(self._offsets, heads)
        ]
        fields = np.concatenate([np.vstack([*head, start]) for head, start in zip(heads, starts)], axis=1)
        for row, size, written, start in fields[:, self._places()[skipped:]].T.tolist():
            data = np.empty(size, np.uint8)
            self._file.seek(start)
            self._file.readinto(data.data)  # type: ignore[attr-defined]
            packet = Packet(row, data, written)
            if not packet.is_whole:
                raise packet.damage(self._name)
            yield packet

    def _block_bytes(self, index: Dict[str, Any]) -> Array:
        return np.array(index['block_bytes'], np.int64)

    def _verify_blocks(self, checksums: List[int]) -> None:
        for number in range(len(self._lengths)):
            self._demand_block(number, zlib.crc32(self._head(number).tobytes()), checksums)
        for _ in self.packets():
            pass

    def _head(self, number: int) -> Array:
        """Return row numbers, sizes and checksums of a block's packets, ``(3, n)``."""
        length, num_bytes = int(self._lengths[number]), int(self._offsets[number + 1] - self._offsets[number])
        self._file.seek(self._offsets[number])
        head = np.frombuffer(self._file.read(24 * length), np.int64).reshape(3, length)
        if not ((head[1] >= 0) & (head[1] <= num_bytes)).all() or head[1].sum() + 24 * length != num_bytes:
            raise CorruptPayload(f'{self._name!r} is damaged: the sizes of the packets in block {number} are wrong')
        return head
