"""Saving a buffer to one file, which appears whole or not at all, and loading it; also DequeBuffer's files."""

from __future__ import annotations

import copy
import errno
import json
import os
import tempfile
from itertools import chain
from typing import IO, Any, Dict, Iterable, Iterator, List, Optional, Union

from ding_store.buffer import old_saves, saves, space
from ding_store.buffer.arrays import Array
from ding_store.buffer.elements import Elements
from ding_store.buffer.narrowing import candidates
from ding_store.buffer.old_saves import OldSave
from ding_store.buffer.saves import BLOCK_BYTES, Metas, Save, SaveWriter, contents
from ding_store.columns import Schema
from ding_store.errors import CorruptPayload, FormatMismatch

MAGIC = b'ding_store buffer\n'
_HDF5_MAGIC = b'\x89HDF'


def save(file_name: str, elements: Elements) -> None:
    """
    Overview:
        Write everything to a file next to it first, then put it in its place. Holds up writers only at the end, for
        what they changed meanwhile.
    Raises:
        - NotEnoughSpace: The disk is full; an older file of the name is still there.
    """
    directory = os.path.dirname(os.path.abspath(file_name))
    os.makedirs(directory, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix='.' + os.path.basename(file_name), dir=directory)
    try:
        with open(descriptor, 'wb') as file:
            file.write(MAGIC)
            SaveWriter(file, elements).write()
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
        - FormatMismatch: Of a later version; nothing changed.
    """
    with open(file_name, 'rb') as file:
        start = file.read(len(MAGIC))
        if start.startswith(_HDF5_MAGIC):
            _load_stock(file_name, elements)
            return
        if start != MAGIC:
            raise CorruptPayload(f'{file_name!r} is no saved buffer: it begins with {start!r}')
        _read(_opened(file, file_name), elements)


def duplicate(elements: Elements, memo: Dict[int, Any]) -> Elements:
    """A private copy, with the same row numbers."""
    with elements.table.write_lock:
        twin = Elements(elements.table.capacity)
        kept = contents(elements)
        _begin(twin, elements.schema, copy.deepcopy(kept.objects, memo), elements.table.narrow)
        if elements.schema is not None:
            for chunk in _chunks(kept.rows, elements.table.row_bytes):
                twin.table.extend(elements.table.gather(chunk))
        _finish(twin, kept.rows, kept.next_row, copy.deepcopy(kept.metas, memo))
        return twin


def _opened(file: IO[bytes], file_name: str) -> Union[OldSave, Save]:
    try:
        fields = json.loads(file.read(int.from_bytes(file.read(8), 'little')))
        version = fields['version']
    except (ValueError, TypeError, KeyError, MemoryError, OverflowError) as e:
        raise CorruptPayload(f'{file_name!r} has no readable header: it is truncated or of another program') from e
    if version not in (old_saves.VERSION, saves.VERSION):
        raise FormatMismatch(f'{file_name!r} is of format {version}, this version reads up to {saves.VERSION}')
    return OldSave(file, fields, file_name) if version == old_saves.VERSION else Save(file, fields, file_name)


def _read(saved: Union[OldSave, Save], elements: Elements) -> None:
    metas, objects = saved.extras()
    schema = None if saved.schema is None else Schema.from_json(saved.schema)
    skipped = max(0, len(saved.rows) - elements.table.capacity)
    with elements.table.write_lock:
        parts = saved.read(skipped, BLOCK_BYTES) if schema is not None else iter(())
        first = next(parts, None)
        narrow = saved.narrow
        if narrow is None and schema is not None:
            narrow = candidates(schema.columns(), first or {})
        _begin(elements, schema, objects and objects[skipped:], narrow or ())
        for columns in chain([first] if first else [], parts):
            elements.table.extend(columns)
        kept = [(place - skipped, meta) for place, meta in metas if place >= skipped]
        _finish(elements, saved.rows[skipped:], saved.next_row, kept)


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


def _begin(
    elements: Elements, schema: Optional[Schema], objects: Optional[List[Any]], narrow: Iterable[str] = ()
) -> None:
    elements.clear()
    if schema is not None:
        elements.start(schema, narrow=narrow)
    elif objects is not None:
        elements.start_objects()
        elements.append(objects)


def _finish(elements: Elements, rows: Array, next_row: int, metas: Metas) -> None:
    index = elements.table.index
    with index.lock:
        elements.table.relabel(rows, next_row)
        slots = index.slots_by_age()
        for place, meta in metas:
            elements.metas.put(int(slots[place]), int(rows[place]), meta)


def _chunks(items: Array, item_bytes: int) -> Iterator[Array]:
    step = max(1, BLOCK_BYTES // max(1, item_bytes))
    for start in range(0, len(items), step):
        yield items[start : start + step]


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
