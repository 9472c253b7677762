"""
A buffer's contents in one file:

    magic, length of the header (8 bytes, little endian), header (JSON), row numbers (int64), columns one after the
    other, pickled extras (metas, and elements that are Python objects)
"""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import tempfile
from dataclasses import dataclass
from math import prod
from typing import IO, Any, Dict, Iterator, List, Optional, Tuple

import numpy as np

from ding_store.buffer import space
from ding_store.buffer.arrays import Array
from ding_store.buffer.elements import Elements
from ding_store.buffer.regions import ColumnSpec
from ding_store.columns import Schema
from ding_store.errors import CorruptPayload

MAGIC = b'ding_store buffer\n'
VERSION = 1
_HDF5_MAGIC = b'\x89HDF'

#: Payload bytes that are gathered at once.
_CHUNK_BYTES = 16 << 20


@dataclass
class Header:
    """What precedes the payload."""

    num_rows: int
    next_row: int
    schema: Optional[Dict[str, Any]]
    columns: List[Tuple[str, str, List[int]]]
    num_extra_bytes: int
    version: int = VERSION

    @property
    def specs(self) -> Dict[str, ColumnSpec]:
        return {name: (np.dtype(dtype), tuple(shape)) for name, dtype, shape in self.columns}

    @property
    def num_bytes(self) -> int:
        row_bytes = 8 + sum(dtype.itemsize * prod(shape) for dtype, shape in self.specs.values())
        return self.num_rows * row_bytes + self.num_extra_bytes


def save(file_name: str, elements: Elements) -> None:
    """
    Overview:
        Write everything to a file next to it first, then put it in its place. Holds up writers, not readers.
    Raises:
        - NotEnoughSpace: The disk is full; an older file of the name is still there.
    """
    directory = os.path.dirname(os.path.abspath(file_name))
    os.makedirs(directory, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix='.' + os.path.basename(file_name), dir=directory)
    try:
        with open(descriptor, 'wb') as file:
            _write(file, elements)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's files are for their owner only; those that a person saves follow the umask.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, file_name)
    except BaseException as e:
        os.unlink(temporary)
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
            num_bytes = len(elements.table) * elements.table.row_bytes
            raise space.not_enough_space(f'the buffer saved to {file_name!r}', num_bytes, directory) from e
        raise


def load(file_name: str, elements: Elements) -> None:
    """
    Overview:
        Replace what is in the buffer. Files hold pickles (DequeBuffer's, too): load only what you trust.
    Raises:
        - CorruptPayload: Truncated, or no such file; nothing changed.
    """
    with open(file_name, 'rb') as file:
        start = file.read(len(MAGIC))
        if start.startswith(_HDF5_MAGIC):
            _load_stock(file_name, elements)
            return
        if start != MAGIC:
            raise CorruptPayload(f'{file_name!r} is no saved buffer: it begins with {start!r}')
        header = _read_header(file, file_name)
        _read(file, header, elements)


def duplicate(elements: Elements, memo: Dict[int, Any]) -> Elements:
    """A private copy, with the same row numbers."""
    with elements.table.write_lock:
        twin = Elements(elements.table.capacity)
        rows, objects, metas = _contents(elements)
        _begin(twin, elements.schema, copy.deepcopy(objects, memo))
        if elements.schema is not None:
            for chunk in _chunks(rows, elements.table.row_bytes):
                twin.table.extend(elements.table.gather(chunk))
        _finish(twin, rows, elements.table.next_row, copy.deepcopy(metas, memo))
        return twin


def _write(file: IO[bytes], elements: Elements) -> None:
    table = elements.table
    with table.write_lock:
        rows, objects, metas = _contents(elements)
        extra = pickle.dumps((metas, objects), protocol=4)
        schema = None if elements.schema is None else elements.schema.to_json()
        columns = [(name, dtype.str, list(shape)) for name, (dtype, shape) in table.specs.items()]
        header = json.dumps(Header(len(rows), table.next_row, schema, columns, len(extra)).__dict__).encode()
        file.write(MAGIC + len(header).to_bytes(8, 'little') + header)
        file.write(rows.tobytes())
        with table.index.lock:
            slots = table.index.slots_by_age().astype(np.intp)
        for column in table.columns.values():
            for chunk in _chunks(slots, column.itemsize * prod(column.shape[1:])):
                file.write(column[chunk].data)
        file.write(extra)


def _read_header(file: IO[bytes], file_name: str) -> Header:
    try:
        header = Header(**json.loads(file.read(int.from_bytes(file.read(8), 'little'))))
    except (ValueError, TypeError, MemoryError, OverflowError) as e:
        raise CorruptPayload(f'{file_name!r} has no readable header: it is truncated or of another program') from e
    if header.version != VERSION:
        raise CorruptPayload(f'{file_name!r} is of format {header.version}, this version reads {VERSION}')
    there = os.fstat(file.fileno()).st_size - file.tell()
    if there != header.num_bytes:
        raise CorruptPayload(
            f'{file_name!r} is truncated: {space.format_bytes(header.num_bytes)} should follow its header, '
            f'{space.format_bytes(there)} do ({header.num_bytes} and {there} bytes)'
        )
    return header


def _read(file: IO[bytes], header: Header, elements: Elements) -> None:
    rows = np.frombuffer(file.read(8 * header.num_rows), np.int64)
    start = file.tell()
    file.seek(-header.num_extra_bytes, os.SEEK_END)
    metas, objects = pickle.load(file)  # noqa: S301  our own file, trusted like DequeBuffer's hickle
    schema = None if header.schema is None else Schema.from_json(header.schema)
    skipped = max(0, header.num_rows - elements.table.capacity)
    with elements.table.write_lock:
        _begin(elements, schema, objects and objects[skipped:])
        if schema is not None:
            for columns in _read_columns(file, header, start, skipped):
                elements.table.extend(columns)
        kept = [(place - skipped, meta) for place, meta in metas if place >= skipped]
        _finish(elements, rows[skipped:], header.next_row, kept)


def _read_columns(file: IO[bytes], header: Header, start: int, skipped: int) -> Iterator[Dict[str, Array]]:
    specs = header.specs
    widths = {name: dtype.itemsize * prod(shape) for name, (dtype, shape) in specs.items()}
    offsets, place = {}, start
    for name, width in widths.items():
        offsets[name] = place
        place += width * header.num_rows
    for chunk in _chunks(np.arange(skipped, header.num_rows), sum(widths.values())):
        columns = {}
        for name, (dtype, shape) in specs.items():
            file.seek(offsets[name] + int(chunk[0]) * widths[name])
            data = file.read(len(chunk) * widths[name])
            columns[name] = np.frombuffer(data, dtype).reshape((len(chunk), *shape))
        yield columns


def _load_stock(file_name: str, elements: Elements) -> None:
    import hickle

    contents = hickle.load(file_name)
    # DequeBuffer saves (storage, indices, meta_index); the config pipeline's buffers a list of elements.
    items = contents[0] if isinstance(contents, tuple) else [item for item in contents if item is not None]
    elements.clear()
    for item in items:
        if hasattr(item, 'data') and hasattr(item, 'meta'):
            elements.append([item.data], [item.meta])
        else:
            elements.append([item])


def _contents(elements: Elements) -> Tuple[Array, Optional[List[Any]], List[Tuple[int, Dict[Any, Any]]]]:
    """Row numbers by age, the objects if elements are such, and the metas that are not empty with their places."""
    with elements.table.index.lock:
        slots = elements.table.index.slots_by_age().astype(np.intp)
        rows = elements.table.index.row_of_slot[slots]
    objects = None if elements.objects is None else elements.objects.take(slots)
    metas = [(place, dict(elements.metas.peek(slot))) for place, slot in enumerate(slots.tolist())]
    return rows, objects, [(place, meta) for place, meta in metas if meta]


def _begin(elements: Elements, schema: Optional[Schema], objects: Optional[List[Any]]) -> None:
    elements.clear()
    if schema is not None:
        elements.start(schema)
    elif objects is not None:
        elements.start_objects()
        elements.append(objects)


def _finish(elements: Elements, rows: Array, next_row: int, metas: List[Tuple[int, Dict[Any, Any]]]) -> None:
    index = elements.table.index
    with index.lock:
        index.relabel(rows, next_row)
        slots = index.slots_by_age()
        for place, meta in metas:
            elements.metas.put(int(slots[place]), int(rows[place]), meta)


def _chunks(items: Array, item_bytes: int) -> Iterator[Array]:
    step = max(1, _CHUNK_BYTES // max(1, item_bytes))
    for start in range(0, len(items), step):
        yield items[start : start + step]


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
