"""The header of a table's directory. It names the valid files and their contents, and is replaced as a whole."""

from __future__ import annotations

import json
import os
import re
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any, Callable, Dict, List, Optional

import numpy as np

from ding_store import private_files
from ding_store.buffer.persistence.journal import explained
from ding_store.errors import CorruptPayload, FormatMismatch, StoreError
from ding_store.power_cuts import sync_directory

#: Version 1 had no generations. Version 2 had no first row. Version 3 had no checksums, except for the header and
#: commits. A header with columns that share frames has the second version, and any other header the first.
VERSION, VERSION_OF_FRAMES = 4, 5
#: Names of column files.
COLUMN_FILE = re.compile(r'[0-9]{3,20}\.column')
#: The only other encoding of values, see ``narrowing``.
ENCODING = 'k/255'
#: The dtype of references to frames, and that of their hashes.
REFERENCE, HASH = np.dtype(np.int32), np.dtype(np.uint64)
#: The maximum of numpy 1.
_MAX_DIMENSIONS = 32


@dataclass
class StoredFrames:
    """
    Overview:
        The frames that one or more columns share, in the header. Such columns have equal descriptions of them.
    Arguments:
        - shape (:obj:`List[int]`): The shape of a frame: the last axes of the column's shape.
        - capacity (:obj:`int`): The maximum number of frames.
        - file (:obj:`str`): The file of the frames.
        - hashes (:obj:`str`): The file of their hashes. A wrong hash only makes equal frames be kept twice.
    """

    shape: List[int]
    capacity: int
    file: str
    hashes: str


@dataclass
class StoredColumn:
    """
    Overview:
        A column in the header.
    Arguments:
        - file (:obj:`str`): The file of the values, or of references to ``frames``. Empty if they have no bytes.
        - encoding (:obj:`Optional[str]`): None if the values are stored unchanged.
        - frames (:obj:`Optional[StoredFrames]`): The frames of the values, if columns share them.
    """

    name: str
    dtype: str
    shape: List[int]
    file: str
    encoding: Optional[str] = None
    frames: Optional[StoredFrames] = None

    @property
    def num_frames(self) -> int:
        """The number of references of a row."""
        assert self.frames is not None
        return prod(self.shape[: len(self.shape) - len(self.frames.shape)])

    def sizes(self, capacity: int) -> Dict[str, int]:
        """Return the files of this column, and the bytes that each needs for so many rows."""
        item_bytes, frames = np.dtype(self.dtype).itemsize, self.frames
        if frames is None:
            num_bytes = item_bytes * prod(self.shape) * capacity
            return {self.file: num_bytes} if num_bytes else {}
        return {
            self.file: REFERENCE.itemsize * self.num_frames * capacity,
            frames.file: item_bytes * prod(frames.shape) * frames.capacity,
            frames.hashes: HASH.itemsize * frames.capacity,
        }


@dataclass
class TableHeader:
    """
    Overview:
        The contents of a directory.
    Arguments:
        - info (:obj:`Any`): Information of the table's owner: its schema.
        - generation (:obj:`int`): Number of times that all rows were replaced at once, see
          ``TableDirectory.replacing``.
        - next_row (:obj:`int`): The lowest number for the next row.
        - num_skipped (:obj:`int`): Number of row numbers that were skipped when rows were replaced.
        - first_row (:obj:`int`): Rows below this one were deleted, all at once.
    """

    capacity: int
    columns: List[StoredColumn] = field(default_factory=list)
    info: Any = None
    generation: int = 0
    next_row: int = 0
    num_skipped: int = 0
    first_row: int = 0


def read_header(path: str) -> Optional[TableHeader]:
    """
    Overview:
        Read a header. Return None if there is no file, and so no table. All fields are checked, because another program
        may have written a header with a valid checksum.
    Raises:
        - FormatMismatch, CorruptPayload: The header has another version, or is invalid.
    """
    try:
        with open(path, 'rb', opener=private_files.opener) as file:
            checksum, text = file.read().split(b'\n', 1)
        if int(checksum, 16) != zlib.crc32(text):
            raise ValueError('its checksum is wrong')
        fields = json.loads(text)
        version = _number(fields['version'], 'version')
        if version in (VERSION, VERSION_OF_FRAMES):
            return _header(fields)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        if isinstance(e, StoreError):
            raise
        raise CorruptPayload(f'{path!r} is not the header of a table, or was damaged: {e}') from e
    raise FormatMismatch(
        f'{path!r} has version {version}, but this ding_store reads the versions {VERSION} and {VERSION_OF_FRAMES}. '
        'Open it with the version of ding_store that wrote it.'
    )


def _header(fields: Dict[str, Any]) -> TableHeader:
    columns = [_column(column) for column in fields['columns']]
    if len({column.name for column in columns}) < len(columns):
        raise ValueError('two columns have the same name')
    unknown = {column.encoding for column in columns} - {None, ENCODING}
    if unknown:
        raise FormatMismatch(
            f'columns of encodings {unknown} were written by a later version of ding_store. Upgrade ding_store.'
        )
    header = TableHeader(**{name: value for name, value in fields.items() if name != 'version'} | {'columns': columns})
    for what in ('generation', 'next_row', 'num_skipped', 'first_row'):
        _number(getattr(header, what), what)
    if _number(header.capacity, 'capacity') < 1:
        raise ValueError(f'its capacity is {header.capacity}')
    _check_files(header)
    return header


def _check_files(header: TableHeader) -> None:
    """Raise ValueError if a file has two uses, or is too small for the frames of all rows."""
    files = [column.file for column in header.columns if column.file]
    shared: Dict[str, List[StoredColumn]] = {}
    for column in header.columns:
        if column.frames is not None:
            shared.setdefault(column.frames.file, []).append(column)
    for columns in shared.values():
        frames = columns[0].frames
        assert frames is not None
        if any((each.frames, each.dtype) != (frames, columns[0].dtype) for each in columns):
            raise ValueError(f'columns describe the frames in {frames.file!r} differently')
        if frames.capacity < header.capacity * sum(each.num_frames for each in columns):
            raise ValueError(f'{frames.file!r} has too few frames')
        files += frames.file, frames.hashes
    if len(set(files)) < len(files):
        raise ValueError('a file has two uses')


def _column(fields: Any) -> StoredColumn:
    column = StoredColumn(**fields)
    if column.frames is not None:
        column.frames = StoredFrames(**fields['frames'])
    texts = column.name, column.dtype, column.file, column.encoding or ''
    if not all(isinstance(text, str) for text in texts) or not isinstance(column.shape, list):
        raise ValueError(f'{fields!r:.200} is not a column')
    dtype = np.dtype(column.dtype)
    num_bytes = dtype.itemsize * prod([_number(size, 'shape') for size in column.shape])
    if dtype.hasobject or dtype.itemsize == 0 or dtype.str != column.dtype or len(column.shape) > _MAX_DIMENSIONS:
        raise ValueError(f'{fields!r:.200} is not a column')
    if column.encoding == ENCODING and dtype != np.uint8:
        raise ValueError(f'{fields!r:.200} cannot have encoding {ENCODING}')
    files = [column.file]
    if column.frames is not None:
        _check_frames(column, column.frames)
        files += column.frames.file, column.frames.hashes
    for file in files:
        # The name is opened in this directory: it must not lead out of it.
        if not (COLUMN_FILE.fullmatch(file) if num_bytes else file == ''):
            raise ValueError(f'{file!r} is not the name of a column file')
    return column


def _check_frames(column: StoredColumn, frames: StoredFrames) -> None:
    if not all(isinstance(text, str) for text in (frames.file, frames.hashes)) or not isinstance(frames.shape, list):
        raise ValueError(f'{frames!r:.200} are not frames')
    shape = [_number(size, 'shape') for size in frames.shape]
    if not prod(column.shape) or column.shape[max(0, len(column.shape) - len(shape)) :] != shape:
        raise ValueError(f'values of shape {column.shape} do not consist of frames of shape {shape}')
    if not 0 < _number(frames.capacity, 'number of frames') <= np.iinfo(REFERENCE).max:
        raise ValueError(f'{frames.capacity} frames are too many or too few')


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f'its {what} is {value!r:.80}')
    return value


def _fields_of(column: StoredColumn) -> Dict[str, Any]:
    fields = dict(vars(column))
    if column.frames is None:
        del fields['frames']
    else:
        fields['frames'] = vars(column.frames)
    return fields


def write_header(path: str, header: TableHeader, fsync: bool = False) -> None:
    """
    Overview:
        Replace the header of a directory.
    Raises:
        - NotEnoughSpace: The disk is full. The old header is unchanged.
    """
    prepare_header(path, header, fsync)()


def prepare_header(path: str, header: TableHeader, fsync: bool = False) -> Callable[[], None]:
    """Write a header to a temporary file. The returned function replaces the old header by it."""
    columns = [_fields_of(column) for column in header.columns]
    version = VERSION_OF_FRAMES if any(column.frames is not None for column in header.columns) else VERSION
    text = json.dumps({**vars(header), 'columns': columns, 'version': version}).encode()
    temporary = path + '.new'
    try:
        with open(temporary, 'wb', opener=private_files.create_opener) as file:
            file.write(b'%08x\n' % zlib.crc32(text) + text)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
    except OSError as e:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise explained(e, path, len(text)) from e

    is_begun = False

    def commit() -> None:
        nonlocal is_begun
        was_begun, is_begun = is_begun, True
        try:
            os.replace(temporary, path)
        except FileNotFoundError:
            if not was_begun:
                raise  # On a repeated call the file may have been replaced before an exception came.
        if fsync:
            sync_directory(os.path.dirname(path))

    return commit
