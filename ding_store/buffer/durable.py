"""
A table's directory, and how it survives its process.

    lock         claimed (flock) by the process that has the table open
    header       JSON and its checksum: version, capacity, columns and their files, schema; replaced as a whole
    rows         per slot the row number, or a negative one: mapped, the very array that the index works on
    NNN.column   one column, by slot; mapped
    commit       the next row number, and the owner's note: two records in turn, see ``commits``
    metas        journal of (row numbers, meta), of which the last one of a row counts
    redo         the rows that are being overwritten in place, if any
    NAME.values  a number per row, each with the row number; mapped, see ``slot_values``: priorities, uses
    NAME.record  a dict that is replaced as a whole, as the note of a commit is: a queue's place, a limiter's counts

What a slot goes through; the arrow is what is stored, in this order by one thread:

    FREE      --- payload ---> FREE      nothing says yet that there is anything
    FREE      --- meta ------> FREE      a meta of a row that is not live counts for nothing
    FREE      --- row number > WRITTEN   its number is not below the next row: a crash makes it FREE again
    WRITTEN   --- commit ----> LIVE      one record makes all rows of a push live, and the owner's note with them
    LIVE      --- -1 --------> FREE      deleted; or evicted, which is stored before the first byte of its successor

    LIVE --- redo record ---> LIVE, to be overwritten --- payload ---> --- no redo record ---> LIVE
             a crash from here on                         repeats this

What samplers keep is beside it, and no row waits for it. Priorities that come with new rows are stored before these are
LIVE; later ones, uses and a queue's place before the call returns that changes them. So a kill may count a batch that
nobody got, but a row never comes more often than it may, and a queue never gives one twice. How many rows the limiter
let in follows from the commit itself: it keeps only what its count began at.

Other columns, or another capacity: new files are complete before the header names them, old ones go after it stopped
to. So a kill finds at most files that no header names (removed), files longer than the header's capacity (cut), a row
in two slots that were copied from one to the other (the second is freed), and rows beyond the next row (freed).
Rows that had to leave for a push that was killed are gone: the oldest, and as many as were pushed.

A kill loses nothing that was stored, as the pages are the kernel's. A power cut may, and in any order; with
``fsync=True`` every step above is on the disk before the next one begins.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional

import numpy as np

from ding_store import private
from ding_store.buffer.arrays import Array
from ding_store.buffer.commits import FILE_BYTES, CommitFile, Record
from ding_store.buffer.journal import Journal, explained, reserve
from ding_store.buffer.rows import EMPTY
from ding_store.buffer.slot_values import SlotValues
from ding_store.errors import ConfigError, CorruptPayload, FormatMismatch, StoreClosed, TableLocked
from ding_store.storage.mapped import Claim, claim

VERSION = 1
#: How a column may be kept other than as it is: see ``narrowing``.
ENCODING = 'k/255'

_OURS = ('rows', 'commit', 'metas', 'redo')
_TEMPORARY = ('header.new', 'metas.new')
_COLUMN = re.compile(r'\d{3,}\.column')


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
    """What a directory holds. ``info`` is for the owner of the table: its schema."""

    capacity: int
    columns: List[StoredColumn] = field(default_factory=list)
    info: Any = None
    version: int = VERSION


class Home:
    """
    Overview:
        A table's directory, opened for this process alone; made if there is none.
    Arguments:
        - path (:obj:`str`): The directory.
        - capacity (:obj:`int`): Of the table.
        - fsync (:obj:`bool`): Whether to survive power cuts, too.
    Raises:
        - TableLocked: It is open already, here or in another process.
        - FormatMismatch: Another version of this package made it.
        - ConfigError: Its capacity is another.
        - CorruptPayload: A file of it is truncated or not ours. Nothing was changed.
    """

    def __init__(self, path: str, capacity: int, fsync: bool = False) -> None:
        self.path = os.path.abspath(path)
        self.fsync = fsync
        self._values: Dict[str, SlotValues] = {}
        self._records: Dict[str, Record] = {}
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        _refuse_foreign(self.path)
        self._claim = _claim(self.path)
        try:
            header = read_header(self.file('header'))
            if header is None:
                _refuse_columns(self.path)
                header = self._begin(capacity)
            self.header = header
            self._check(capacity)
            self._numbers_region = _map(self.file('rows'), 8 * capacity)
            self._commits = CommitFile(_map(self.file('commit'), FILE_BYTES), self.file('commit'))
        except BaseException:
            self._claim.close()
            raise
        self.numbers: Array = np.frombuffer(self._numbers_region, np.int64)[:capacity]
        self.metas, self.redo = (Journal(self.file(name), fsync) for name in ('metas', 'redo'))
        self._recover()

    @property
    def next_row(self) -> int:
        return self._commits.next_row

    @property
    def note(self) -> Optional[Dict[str, Any]]:
        return self._commits.note

    def file(self, name: str) -> str:
        return os.path.join(self.path, name)

    def new_column_file(self, taken: List[str]) -> str:
        """A name that no file has."""
        number = 0
        while f'{number:03d}.column' in taken or os.path.exists(self.file(f'{number:03d}.column')):
            number += 1
        return f'{number:03d}.column'

    def is_open(self) -> bool:
        """False in a forked child, and once the table was closed: whose writes would ruin it."""
        return self._claim.descriptor >= 0

    def check_open(self) -> None:
        """
        Raises:
            - StoreClosed: See ``is_open``.
        """
        if not self.is_open():
            raise StoreClosed(f'the table in {self.path!r} is closed, or this is a forked process, which may only read')

    def commit(self, next_row: int, note: Optional[bytes] = None) -> None:
        self._commits.commit(next_row, note)
        if self.fsync:
            self._commits.flush()

    def values(self, name: str) -> SlotValues:
        """Numbers by row, of this name."""
        if name not in self._values:
            self._values[name] = SlotValues(self.file(f'{name}.values'), self.header.capacity, self.is_open)
        return self._values[name]

    def record(self, name: str) -> Record:
        """The dict of this name."""
        if name not in self._records:
            path = self.file(f'{name}.record')
            _grow(path, FILE_BYTES)
            self._records[name] = Record(_map(path, FILE_BYTES), path, self.is_open)
        return self._records[name]

    def forget_values(self) -> None:
        """No row has any: row numbers are about to be given to others."""
        for name in self._value_files():
            self.values(name).forget()

    def sync_kept(self) -> None:
        """What samplers keep is on the disk."""
        for values in self._values.values():
            values.sync()
        for record in self._records.values():
            record.sync()

    def sync_numbers(self) -> None:
        if self.fsync:
            self._numbers_region.flush()

    def describe(self, columns: List[StoredColumn], info: Any) -> None:
        """From now on these are the columns, and this their owner's information; then remove what no header names."""
        self.prepare(columns, info)()

    def prepare(self, columns: List[StoredColumn], info: Any) -> Callable[[], None]:
        """
        Overview:
            As ``describe``, when what is returned is called, which needs no more space.
        Raises:
            - NotEnoughSpace: The disk is full; nothing changed.
        """
        header = Header(self.header.capacity, columns, info)
        commit = prepare_header(self.file('header'), header, self.fsync)

        def describe() -> None:
            commit()
            self.header = header
            self._remove_orphans()

        return describe

    def resize(self, capacity: int, source: Array, target: Array) -> Array:
        """
        Overview:
            Have this capacity; of fewer slots, the last ones must be free. Column files are large enough already.
        Returns:
            - numbers (:obj:`np.ndarray`): Row numbers by slot, from now on.
        """
        old = self.header.capacity
        for name in self._value_files():
            self.values(name).resize(max(old, capacity), source, target)
        region = self._numbers_region
        if capacity > old:
            _grow(self.file('rows'), 8 * capacity)
            region = _map(self.file('rows'), 8 * capacity)
        numbers: Array = np.frombuffer(region, np.int64)[:capacity]
        numbers[old:] = EMPTY
        self._replace(Header(capacity, self.header.columns, self.header.info))
        self._numbers_region, self.numbers = region, numbers
        return numbers

    def findings(self, next_row: int, numbers: Array, columns: List[StoredColumn]) -> List[str]:
        """Where the files are not what the table in memory says."""
        header = read_header(self.file('header'))
        commits = CommitFile(_map(self.file('commit'), FILE_BYTES), self.file('commit'))
        checks = {
            'the header is not that of the table': header == self.header,
            'the columns of the header are not those of the table': self.header.columns == columns,
            'the commit record is behind or ahead': commits.next_row == next_row,
            'row numbers are kept elsewhere': numbers is self.numbers or not self.is_open(),
            'an update was not finished': not list(self.redo.read()),
        }
        return [what for what, holds in checks.items() if not holds]

    def close(self) -> None:
        """Let another process have it."""
        if self.is_open():
            self.metas.close()
            self.redo.close()
            if self.fsync:
                self._numbers_region.flush()
                self.sync_kept()
            self._claim.close()

    def _replace(self, header: Header) -> None:
        write_header(self.file('header'), header, self.fsync)
        self.header = header

    def _begin(self, capacity: int) -> Header:
        """Make all files, and the header, without which there is no table, last."""
        self.header = Header(capacity)
        self._remove_orphans()
        for name in os.listdir(self.path):
            if name in _OURS or name.endswith(('.values', '.record')):
                os.unlink(self.file(name))
        for name, num_bytes in (('rows', 8 * capacity), ('commit', FILE_BYTES)):
            _grow(self.file(name), num_bytes)
            region = _map(self.file(name), num_bytes)
            if name == 'rows':
                np.frombuffer(region, np.int64)[:] = EMPTY
            else:
                CommitFile.begin(region)
            if self.fsync:
                region.flush()
        self._replace(self.header)
        return self.header

    def _check(self, capacity: int) -> None:
        """Everything that can be said without changing anything."""
        if self.header.capacity != capacity:
            raise ConfigError(
                f'{self.path!r} holds a table of capacity {self.header.capacity}, not {capacity}: open it with that '
                'size, and resize() it then, or name another directory'
            )
        needed = {'rows': 8 * capacity, 'commit': FILE_BYTES}
        for column in self.header.columns:
            row_bytes = np.dtype(column.dtype).itemsize * int(np.prod(column.shape))
            needed.update({column.file: row_bytes * capacity} if row_bytes else {})
        for name, num_bytes in needed.items():
            there = os.path.getsize(self.file(name)) if os.path.exists(self.file(name)) else -1
            if there < num_bytes:
                found = 'is missing' if there < 0 else f'has {there} bytes'
                raise CorruptPayload(f'{self.file(name)!r} {found} where {num_bytes} are needed: it was truncated')

    def _recover(self) -> None:
        """What a kill left undone; may itself be killed at any point."""
        self._remove_orphans()
        numbers = self.numbers
        numbers[(numbers < 0) | (numbers >= self.next_row)] = EMPTY
        live = np.flatnonzero(numbers != EMPTY)
        # Of a row that was copied from one slot to another the first stays, which is the copy.
        first = np.unique(numbers[live], return_index=True)[1]
        numbers[np.delete(live, first)] = EMPTY

    def _value_files(self) -> List[str]:
        return [name[: -len('.values')] for name in os.listdir(self.path) if name.endswith('.values')]

    def _remove_orphans(self) -> None:
        named = {column.file for column in self.header.columns}
        for name in os.listdir(self.path):
            if name in _TEMPORARY or (_COLUMN.fullmatch(name) and name not in named):
                os.unlink(self.file(name))


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
    if version != VERSION:
        raise FormatMismatch(f'{path!r} is of version {version}, this version of ding_store reads {VERSION}')
    columns = [StoredColumn(**column) for column in fields['columns']]
    unknown = {column.encoding for column in columns} - {None, ENCODING}
    if unknown:
        raise FormatMismatch(f'{path!r} has columns of encodings {unknown}, which this version of ding_store has not')
    return Header(fields['capacity'], columns, fields['info'], version)


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


def sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_foreign(directory: str) -> None:
    names = os.listdir(directory)
    theirs = sorted(name for name in names if name in (*_OURS, 'header') or _COLUMN.fullmatch(name))
    if theirs and 'lock' not in names:
        raise ConfigError(f'{directory!r} is not the directory of a table, but has files {theirs}; name another one')


def _refuse_columns(directory: str) -> None:
    """Files of columns come after the first header: without one this is no new table."""
    columns = sorted(name for name in os.listdir(directory) if _COLUMN.fullmatch(name))
    if columns:
        raise CorruptPayload(
            f'{os.path.join(directory, "header")!r} is missing, but there are columns {columns}: the table cannot be '
            'read without it. Bring it back, or remove the directory to begin anew'
        )


def _claim(directory: str) -> Claim:
    path = os.path.join(directory, 'lock')
    private.touch(path)
    held = claim(path)
    if held is None:
        raise TableLocked(f'the table in {directory!r} is open already, in this process or another; close() it there')
    return held


def _map(path: str, num_bytes: int) -> mmap.mmap:
    with open(path, 'r+b') as file:
        return mmap.mmap(file.fileno(), num_bytes)


def _grow(path: str, num_bytes: int) -> None:
    """Make a file this long if it is shorter, with all its space."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        reserve(descriptor, path, 0, num_bytes)
    finally:
        os.close(descriptor)
