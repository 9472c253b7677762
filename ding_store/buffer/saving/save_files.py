"""Saves a buffer to one file, which appears whole or not at all, and loads such files and those of DequeBuffer."""

from __future__ import annotations

import copy
import errno
import functools
import json
import os
import uuid
from contextlib import suppress
from typing import IO, Any, Callable, Dict, Iterable, Iterator, List, Optional

from ding_store import free_space, private_files
from ding_store.buffer.array_types import Array
from ding_store.buffer.elements.elements import Elements
from ding_store.buffer.elements.ragged_elements import saved_elements
from ding_store.buffer.elements.save_blocks import BLOCK_BYTES
from ding_store.buffer.interrupts import finish
from ding_store.buffer.saving import loads, saves
from ding_store.buffer.saving.loads import Loaded
from ding_store.buffer.saving.saves import Contents, Metas, PackedSave, Save, SaveWriter, contents
from ding_store.buffer.table.narrowing import stored_specs
from ding_store.buffer.table.row_choices import by_rows
from ding_store.buffer.table.table import Table
from ding_store.columns import Schema
from ding_store.errors import CorruptPayload, FormatMismatch, StoreError
from ding_store.power_cuts import sync_directory

MAGIC = b'ding_store buffer\n'
_HDF5_MAGIC = b'\x89HDF'


def save(file_name: str, elements: Elements, counts: Optional[Callable[[], Dict[str, int]]] = None) -> None:
    """
    Overview:
        Save a buffer to a temporary file in the same directory, then rename it. Writers wait only at the end, while the
        rows that they changed meanwhile are saved.
    Arguments:
        - counts (:obj:`Optional[Callable]`): Returns the counts of the buffer's limiter at the moment of the save.
    Raises:
        - NotEnoughSpace: The disk is full. An older file of this name is unchanged.
    """
    directory = os.path.dirname(os.path.abspath(file_name))
    private_files.make_directories(directory)
    # Choose the name here: a signal may interrupt the creation of a file before its name is returned.
    temporary = os.path.join(directory, f'.{os.path.basename(file_name)}{uuid.uuid4().hex[:8]}')
    try:
        with open(temporary, 'xb', opener=private_files.opener) as file:
            file.write(MAGIC)
            SaveWriter(file, elements, counts).write()
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, file_name)
    except BaseException as e:
        finish(functools.partial(remove, temporary))
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise free_space.not_enough_space(
                f'the buffer saved to {file_name!r}', elements.store.num_bytes, directory
            ) from e
        raise
    sync_directory(directory)


def remove(path: str) -> None:
    """Remove a file if it exists."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def load(file_name: str, elements: Elements) -> Optional[Dict[str, int]]:
    """
    Overview:
        Replace the contents of the buffer by those of a file. Files contain pickles, also those of DequeBuffer. Load
        only files that you trust.
    Returns:
        - counts (:obj:`Optional[Dict]`): Counts of the saved buffer's limiter.
    Raises:
        - CorruptPayload: The file is truncated or damaged, or is not a save. Nothing changed.
        - FormatMismatch: The file has another version, or objects of a class that cannot be imported. Nothing changed.
        - SchemaMismatch: The elements do not fit together, or a table with a path cannot hold them. Nothing changed.
        - NotEnoughSpace: There is no space for the old and the new contents. Nothing changed.
    """
    # Hold the lock all the time: the newest rows of a longer file are loaded, up to the present capacity.
    with open(file_name, 'rb') as file, elements.table.write_lock:
        start = file.read(len(MAGIC))
        if start.startswith(_HDF5_MAGIC):
            loaded = _stock(file_name, elements)
        elif start == MAGIC:
            loaded = _saved(file, file_name, elements.table.capacity)
        else:
            raise CorruptPayload(f'{file_name!r} is not a saved buffer: it begins with {start!r}')
        # The collection of these rows ended with the save.
        end = max(loaded.next_row, elements.table.next_row), True
        loads.replace(elements, loaded._replace(breaks=[*loaded.breaks, end]))
        with elements.table.index.lock:
            elements.table.index.tell_loaded()
        return loaded.counts


def duplicate(elements: Elements, memo: Dict[int, Any]) -> Elements:
    """Return a private copy with the same row numbers."""
    with elements.table.write_lock:
        twin = _empty_like(elements)
        kept = contents(elements)
        objects, metas = copy.deepcopy((kept.objects, kept.metas), memo)
        loads.replace(twin, _of(elements, kept._replace(objects=objects, metas=metas)))
        return twin


def _empty_like(elements: Elements) -> Elements:
    """Return private elements with the same settings."""
    is_sharing = elements.table.columns.share_frames
    return Elements(elements.table.capacity, share_frames=is_sharing, ragged=elements.ragged)


def _of(elements: Elements, kept: Contents) -> Loaded:
    """Return the contents of a buffer. The caller holds the table's lock."""
    parts, metas = _gathered(elements.table, kept.rows), _by_place(kept.metas, len(kept.rows))
    narrow = list(elements.table.columns.narrow)
    objects: Optional[Iterable[Any]] = kept.objects
    if objects is None and (elements.schema is None or elements.schema.ragged) and len(kept.rows):
        objects = _one_by_one(elements, kept.rows)
    breaks = elements.sequences.breaks.list()
    return Loaded(elements.schema, parts, narrow, kept.rows, objects, metas, kept.next_row, breaks=breaks)


def _one_by_one(elements: Elements, rows: Array) -> Iterator[Any]:
    for place in range(len(rows)):
        yield elements.read(by_rows(rows[place : place + 1])).elements[0]


def _by_place(metas: Metas, num_rows: int) -> List[Optional[Dict[Any, Any]]]:
    listed: List[Optional[Dict[Any, Any]]] = [None] * (num_rows if metas else 0)
    for place, meta in metas:
        listed[place] = dict(meta)
    return listed


def _gathered(table: Table, rows: Array) -> Iterator[Dict[str, Array]]:
    step = max(1, BLOCK_BYTES // max(1, table.columns.row_bytes))
    for start in range(0, len(rows), step):
        yield table.gather(rows[start : start + step])


def _saved(file: IO[bytes], file_name: str, capacity: int) -> Loaded:
    saved: Optional[Save] = None
    try:
        saved = _opened(file, file_name)
        saved.verify()
        metas, objects = saved.extras()
        metas, objects = _by_place(metas, len(saved.rows)), objects and list(objects)
        schema = None if saved.schema is None else Schema.from_json(saved.schema)
        if (
            schema is not None
            and not saved.is_packed
            and stored_specs(schema.columns(), saved.narrow or ()) != saved.specs
        ):
            raise CorruptPayload(f'{file_name!r} is damaged: its columns are not those of its schema')
    except (StoreError, OSError):
        raise
    except Exception as e:
        if isinstance(e, MemoryError) and saved is not None:
            raise  # Before the checksums were compared, a damaged length may request more memory than exists.
        # json, pickle and numpy raise various errors for damaged or foreign files.
        raise CorruptPayload(f'{file_name!r} cannot be read: it is damaged, or from another program ({e!r})') from e
    skipped = max(0, len(saved.rows) - capacity)
    parts = saved.read(skipped, BLOCK_BYTES) if schema is not None and not saved.is_packed else iter(())
    narrow = None if saved.narrow is None else list(saved.narrow)
    listed: Optional[Iterable[Any]] = objects and objects[skipped:]
    if isinstance(saved, PackedSave):
        listed = saved.packets(skipped)
        if schema is not None:
            listed = saved_elements(schema, listed)
    rows = saved.rows[skipped:]
    return Loaded(schema, parts, narrow, rows, listed, metas[skipped:], saved.next_row, saved.counts, saved.breaks)


def _opened(file: IO[bytes], file_name: str) -> Save:
    header = file.read(min(int.from_bytes(file.read(8), 'little'), os.fstat(file.fileno()).st_size))
    fields = json.loads(header)
    version = fields['version']
    if version not in (saves.VERSION, saves.VERSION_OF_FRAMES):
        raise FormatMismatch(
            f'{file_name!r} has format {version}, but this ding_store reads the formats {saves.VERSION} and '
            f'{saves.VERSION_OF_FRAMES}. Load it with the version of ding_store that wrote it.'
        )
    return (PackedSave if fields.get('packed') else Save)(file, header, file_name)


def _stock(file_name: str, elements: Elements) -> Loaded:
    """Load a file of DequeBuffer. Its elements may be of any kind, so they are first added to a separate buffer."""
    import hickle

    try:
        found = hickle.load(file_name)
        # DequeBuffer saves (storage, indices, meta_index). The buffers of the config pipeline save a list of elements.
        items = list(found[0]) if isinstance(found, tuple) else [item for item in found if item is not None]
    except MemoryError:
        raise
    except Exception as e:
        raise CorruptPayload(f'{file_name!r} is not a buffer that hickle can load, or is truncated ({e!r})') from e
    twin = _empty_like(elements)
    for item in items:
        if hasattr(item, 'data') and hasattr(item, 'meta'):
            twin.append([item.data], [item.meta])
        else:
            twin.append([item])
    kept = contents(twin)
    first = elements.table.next_row
    return _of(twin, kept)._replace(rows=kept.rows + first, next_row=kept.next_row + first)
