"""The header of a table's directory: which files count, and what is in them. Replaced as a whole."""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Callable, List, Optional

from ding_store import private
from ding_store.buffer.durability.journal import explained
from ding_store.errors import CorruptPayload, FormatMismatch
from ding_store.syncing import sync_directory

#: Version 1 had no generations, version 2 no first row.
VERSION = 3
_READABLE = (1, 2, 3)
#: How a column may be kept other than as it is: see ``narrowing``.
ENCODING = 'k/255'


@dataclass
class StoredColumn:
    """A column as the header has it; ``encoding`` is how it is kept, None: as it is."""

    name: str
    dtype: str
    shape: List[int]
    file: str
    encoding: Optional[str] = None


@dataclass
class Header:
    """
    Overview:
        What a directory holds.
    Arguments:
        - info (:obj:`Any`): For the owner of the table: its schema.
        - generation (:obj:`int`): How often all rows were replaced at once: see ``Home.replacing``.
        - next_row (:obj:`int`): The row number that the next row has at least.
        - num_skipped (:obj:`int`): How many row numbers were passed over when rows were replaced.
        - first_row (:obj:`int`): Rows below it were taken out, all at once.
    """

    capacity: int
    columns: List[StoredColumn] = field(default_factory=list)
    info: Any = None
    generation: int = 0
    next_row: int = 0
    num_skipped: int = 0
    first_row: int = 0
    version: int = VERSION


def read_header(path: str) -> Optional[Header]:
    """
    Overview:
        None where there is no such file, and so no table.
    Raises:
        - FormatMismatch, CorruptPayload: It is of another version, or no header.
    """
    try:
        with open(path, 'rb') as file:
            checksum, text = file.read().split(b'\n', 1)
        if int(checksum, 16) != zlib.crc32(text):
            raise ValueError('its checksum is wrong')
        fields = json.loads(text)
        version = fields['version']
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as e:
        raise CorruptPayload(f'{path!r} is no header of a table, or was damaged: {e}') from e
    if version not in _READABLE:
        raise FormatMismatch(f'{path!r} is of version {version}, this version of ding_store reads up to {VERSION}')
    columns = [StoredColumn(**column) for column in fields['columns']]
    unknown = {column.encoding for column in columns} - {None, ENCODING}
    if unknown:
        raise FormatMismatch(f'{path!r} has columns of encodings {unknown}, which this version of ding_store has not')
    return Header(**{**fields, 'columns': columns, 'version': VERSION})


def write_header(path: str, header: Header, fsync: bool = False) -> None:
    """
    Raises:
        - NotEnoughSpace: The disk is full; the old one is still there.
    """
    prepare_header(path, header, fsync)()


def prepare_header(path: str, header: Header, fsync: bool = False) -> Callable[[], None]:
    """As ``write_header``, up to what is returned: that puts it in the old one's place."""
    columns = [vars(column) for column in header.columns]
    text = json.dumps({**vars(header), 'columns': columns}).encode()
    temporary = path + '.new'
    try:
        with open(temporary, 'wb', opener=private.opener) as file:
            file.write(b'%08x\n' % zlib.crc32(text) + text)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
    except OSError as e:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise explained(e, path, len(text)) from e

    def commit() -> None:
        os.replace(temporary, path)
        if fsync:
            sync_directory(os.path.dirname(path))

    return commit
