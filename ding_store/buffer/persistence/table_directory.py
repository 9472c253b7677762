"""
A table's directory, and how it survives its process.

    lock         claimed (flock) by the process that has the table open
    header       JSON and its checksum: version, capacity, columns and their files, schema; replaced as a whole
    rows         per slot the row number, or a negative one: mapped, the very array that the index works on
    marks        per slot a checksum of the row number, see ``marks``; mapped
    NNN.column   one column, by slot; mapped
    commit       the next row number, and the owner's note: two records in turn, see ``commits``
    metas        journal of (row numbers, meta), of which the last one of a row counts
    packed       elements of varying size; columns say where: see ``packed``
    redo         the rows that are being overwritten in place, if any
    NAME.values  a number per row, each with the row number; mapped, see ``slot_values``: priorities, uses
    NAME.record  a dict that is replaced as a whole, as the note of a commit is: a queue's place, a limiter's counts

Whatever goes by row number belongs to a generation, which the header names: when all rows are replaced at once by
others of any numbers, ``rows``, ``marks``, ``metas`` and ``NAME.values`` of the next one, 1, are ``rows.1`` and so on.

Damage is told from what a kill leaves: a mark is stored before its row number, journals and commit records say up to
where they are whole, and values have checksums of their own. What exactly one answer is possible for is repaired; where
rows or metas would be lost the table is refused; a priority or count that is unknown is reported by ``findings``. Bytes
of columns have no checksum; packed elements have one each.

What a slot goes through; the arrow is what is stored, in this order by one thread:

    FREE      --- payload ---> FREE      nothing says yet that there is anything
    FREE      --- meta ------> FREE      a meta of a row that is not live counts for nothing
    FREE      --- mark ------> FREE      the mark of a slot that is free counts for nothing
    FREE      --- row number > WRITTEN   its number is not below the next row: a crash makes it FREE again
    WRITTEN   --- commit ----> LIVE      one record makes all rows of a push live, and the owner's note with them
    LIVE      --- -1 --------> FREE      deleted; or evicted, which is stored before the first byte of its successor

    LIVE --- redo record ---> LIVE, to be overwritten --- payload ---> --- no redo record ---> LIVE
             a crash from here on                         repeats this

What samplers keep is beside it, and no row waits for it. Priorities that come with new rows are stored before these are
LIVE; later ones, uses and a queue's place before the call returns that changes them; those of a row that moves to
another slot before its number. So a kill may count a batch that nobody got, but a row never comes more often than it
may, and a queue never gives one twice. How many rows the limiter let in follows from the commit itself: it keeps only
what its count began at.

No rows at all (``clear``): the header names the first row that counts, then numbers of others are erased.
All rows at once (``load_data``), other columns, or another capacity: new files are complete before the header names
them, old ones go after it stopped to. So a kill finds at most files that no header names (removed), files longer than
the header's capacity (cut), a row in two slots that were copied from one to the other (the second is freed), and rows
beyond the next row or before the first that counts (freed).
Rows that had to leave for a push that was killed are gone: the oldest, and as many as were pushed.

A kill loses nothing that was stored, as the pages are the kernel's. A power cut may, and in any order; with
``fsync=True`` every step above is on the disk before the next one begins; what samplers keep is there with the next
push. ``tests/disk.py`` is a model of a disk that loses its power.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Callable, Dict, Iterable, List, Optional

import numpy as np

from ding_store import private_files
from ding_store.buffer.array_types import Array
from ding_store.buffer.kernels.constants import EMPTY
from ding_store.buffer.persistence.commits import FILE_BYTES, CommitFile, CommitRecord
from ding_store.buffer.persistence.journal import MIN_BYTES, Journal, convert, reserve
from ding_store.buffer.persistence.row_checksums import RowChecksums
from ding_store.buffer.persistence.slot_values import SlotValues
from ding_store.buffer.persistence.table_header import (
    COLUMN_FILE,
    VERSION,
    StoredColumn,
    TableHeader,
    prepare_header,
    read_header,
    write_header,
)
from ding_store.errors import ConfigError, CorruptPayload, FormatMismatch, StoreClosed, TableLocked
from ding_store.power_cuts import sync_directory, sync_file, sync_path
from ding_store.storage.shared_memory.mapped_files import OwnerLock, claim

logger = logging.getLogger(__name__)

_OURS = ('rows', 'marks', 'commit', 'metas', 'redo', 'packed')
_TEMPORARY = re.compile(r'(header|metas)(\.\d+)?\.new')
_OF_GENERATION = re.compile(r'(?:rows|marks|metas|[\w-]+\.values)(?:\.(\d+))?')


class TableDirectory:
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
        self.path = private_files.directory(path)
        self.fsync = fsync
        self._values: Dict[str, SlotValues] = {}
        self._records: Dict[str, CommitRecord] = {}
        #: What was found to be damaged when it was opened.
        self._damage: List[str] = []
        _refuse_foreign(self.path)
        self._claim = _claim(self.path)
        with ExitStack() as undo:
            undo.callback(self._claim.close)
            header = read_header(self.file('header'))
            if header is None:
                _refuse_columns(self.path)
                header = self._begin(capacity)
            self.header = header
            self._check(capacity)
            self._numbers_region = _map(self._current('rows'), 8 * capacity)
            self._commits = CommitFile(_map(self.file('commit'), FILE_BYTES), self.file('commit'), fsync)
            self.numbers: Array = np.frombuffer(self._numbers_region, np.int64)[:capacity]
            if header.version < VERSION:
                self._convert()
            self._marks = RowChecksums(_map(self._current('marks'), 8 * capacity), capacity)
            self.metas = Journal(self._current('metas'), fsync)
            undo.callback(self.metas.close)
            self.redo = Journal(self.file('redo'), fsync)
            undo.callback(self.redo.close)
            self._recover()
            if fsync:
                self._sync_all()
            undo.pop_all()

    @property
    def next_row(self) -> int:
        return max(self._commits.next_row, self.header.next_row)

    @property
    def generation(self) -> int:
        """How often all rows were replaced at once."""
        return self.header.generation

    @property
    def num_skipped(self) -> int:
        """How many row numbers no row was inserted with, but passed over when all were replaced."""
        return self.header.num_skipped

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

    def mark(self, slots: Array, first_row: int) -> None:
        """These slots are about to have rows from this number on; with fsync=True their marks are on the disk then."""
        self._marks.put_run(slots, first_row)
        if self.fsync:
            # An old mark on the disk beside a new number would be taken for a number that was damaged.
            self._marks.sync()

    def report(self, finding: str) -> None:
        """A file was damaged, and what was in it is unknown now: ``findings`` says so for as long as this is open."""
        self._damage.append(finding)
        logger.warning('%s; the table goes on without it', finding)

    def commit(self, next_row: int, note: Optional[bytes] = None) -> None:
        self._commits.commit(next_row, note)
        if self.fsync:
            self._commits.flush()

    def values(self, name: str) -> SlotValues:
        """Numbers by row, of this name."""
        if name not in self._values:
            path = self._current(f'{name}.values')
            self._values[name] = SlotValues(path, self.header.capacity, self.is_open, self.report)
            self._sync_names()
        return self._values[name]

    def record(self, name: str, of_rows: bool = True) -> CommitRecord:
        """The dict of this name; it counts for nothing when the rows it is of were replaced (``of_rows``)."""
        if name not in self._records:
            path = self.file(f'{name}.record')
            generation = (lambda: self.generation) if of_rows else (lambda: 0)
            self._records[name] = CommitRecord(_map(path, FILE_BYTES), path, self.is_open, generation, self.fsync)
            self._sync_names()
        return self._records[name]

    def remove_record(self, name: str) -> None:
        """Have no record of this name, if there is one."""
        self._records.pop(name, None)
        with suppress(FileNotFoundError):
            os.unlink(self.file(f'{name}.record'))

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
        header = replace(self.header, columns=columns, info=info)
        commit = prepare_header(self.file('header'), header, self.fsync)

        def describe() -> None:
            commit()
            self.header = header
            self._remove_orphans()

        return describe

    def replacing(
        self, columns: List[StoredColumn], info: Any, rows: Array, next_row: int, metas: Iterable[bytes]
    ) -> Callable[[], None]:
        """
        Overview:
            As ``prepare``, and have these rows instead of all others: a kill leaves the ones or the others.
        Arguments:
            - rows (:obj:`np.ndarray`): Row numbers in the first slots; they may have been those of others.
            - next_row (:obj:`int`): The row number that the next row has at least.
            - metas (:obj:`Iterable[bytes]`): Their records.
        Raises:
            - NotEnoughSpace: The disk is full; nothing changed.
        """
        next_row = max(next_row, self.next_row)
        num_skipped = self.header.num_skipped + next_row - self.next_row
        generation, capacity = self.generation + 1, self.header.capacity
        header = TableHeader(capacity, columns, info, generation, next_row, num_skipped)
        with ExitStack() as undo:
            undo.callback(self._remove_other_generations)
            numbers = _new_numbers(self._current('rows', generation), capacity)
            np.frombuffer(numbers, np.int64)[: len(rows)] = rows
            marks = _new_marks(self._current('marks', generation), capacity)
            marks.put(np.arange(len(rows)), rows)
            journal = self.metas.prepare(metas, self._current('metas', generation))
            undo.callback(journal.close)
            values = {
                name: self.values(name).successor(self._current(f'{name}.values', generation))
                for name in self._value_files()
            }
            if self.fsync:
                numbers.flush()
                marks.sync()
                for each in values.values():
                    each.sync()
            commit = prepare_header(self.file('header'), header, self.fsync)
            undo.pop_all()

        def replace_all() -> None:
            commit()
            self.header = header
            self._numbers_region, self.numbers = numbers, np.frombuffer(numbers, np.int64)[:capacity]
            self._marks = marks
            self.metas.move_to(journal)
            for name, each in values.items():
                self._values[name].become(each)
            self._remove_orphans()

        return replace_all

    def resizing(self, capacity: int) -> Callable[[], Array]:
        """
        Overview:
            Make room for this capacity. Column files are large enough already.
        Returns:
            - resize (:obj:`Callable`): Has it from now on, which needs no more space, and returns row numbers by slot.
              Of fewer slots, the rows of the last ones must be in others by then.
        Raises:
            - NotEnoughSpace: The disk is full; nothing changed.
        """
        old = self.header.capacity
        for name in self._value_files():
            self.values(name).grow(capacity)
        region, marks = self._numbers_region, self._marks
        if capacity > old:
            region = _map(self._current('rows'), 8 * capacity)
            marks = RowChecksums(_map(self._current('marks'), 8 * capacity), capacity)
        numbers: Array = np.frombuffer(region, np.int64)[:capacity]
        numbers[old:] = EMPTY
        if self.fsync:
            region.flush()
        header = replace(self.header, capacity=capacity)
        commit = prepare_header(self.file('header'), header, self.fsync)

        def resize() -> Array:
            commit()
            self.header, self._numbers_region, self.numbers, self._marks = header, region, numbers, marks
            return numbers

        return resize

    def move_values(self, source: Array, target: Array) -> None:
        """What is known of rows is in other slots, too, to which they are about to move."""
        self._marks.put(target, self.numbers[source])
        if self.fsync:
            self._marks.sync()
        for name in self._value_files():
            self.values(name).move(source, target)

    def findings(self, next_row: int, numbers: Array, columns: List[StoredColumn]) -> List[str]:
        """Where the files are not what the table in memory says."""
        committed = max(self._commits.next_row, self.header.next_row)
        try:
            is_same = read_header(self.file('header')) == replace(self.header, version=VERSION)
        except (CorruptPayload, FormatMismatch):
            is_same = False
        checks = {
            'the header is not that of the table': is_same,
            'the columns of the header are not those of the table': self.header.columns == columns,
            # A push that failed has used row numbers up that nobody committed.
            'the commit record is behind or ahead': numbers.max(initial=EMPTY) < committed <= next_row,
            'row numbers are kept elsewhere': numbers is self.numbers or not self.is_open(),
            'an update was not finished': self.redo.end == MIN_BYTES,
        }
        found = [what for what, holds in checks.items() if not holds]
        if self.is_open():
            found += self._marks.findings(numbers)
            files = [self._commits.findings, self.metas.findings, self.redo.findings]
            files += [values.findings for values in self._values.values()]
            files += [record.findings for record in self._records.values()]
            for findings in files:
                found += findings()
        return self._damage + found

    def clear(self) -> None:
        """
        Overview:
            Have none of the rows that there were: their numbers, which are still there, count for nothing from now on.
        Raises:
            - NotEnoughSpace: The disk is full; nothing changed.
        """
        # What was committed, and not what the index is at: after a push that failed it is beyond that, and the next
        # process gives out these numbers again.
        self._replace(replace(self.header, first_row=self.next_row))

    def close(self) -> None:
        """Let another process have it."""
        if self.is_open():
            self.metas.close()
            self.redo.close()
            if self.fsync:
                self._numbers_region.flush()
                self.sync_kept()
            self._claim.close()

    def _replace(self, header: TableHeader) -> None:
        write_header(self.file('header'), header, self.fsync)
        self.header = header

    def _begin(self, capacity: int) -> TableHeader:
        """Make all files, and the header, without which there is no table, last."""
        self.header = TableHeader(capacity)
        self._remove_orphans()
        for name in os.listdir(self.path):
            if name in _OURS or name.endswith(('.values', '.record')):
                os.unlink(self.file(name))
        numbers = _new_numbers(self.file('rows'), capacity)
        marks = _new_marks(self.file('marks'), capacity)
        metas = Journal(self.file('metas'), self.fsync)
        metas.sync()
        metas.close()
        commits = _map(self.file('commit'), FILE_BYTES)
        CommitFile.begin(commits)
        if self.fsync:
            numbers.flush()
            marks.sync()
            commits.flush()
        self._replace(self.header)
        return self.header

    def _check(self, capacity: int) -> None:
        """Everything that can be said without changing anything."""
        if self.header.capacity != capacity:
            raise ConfigError(
                f'{self.path!r} holds a table of capacity {self.header.capacity}, not {capacity}: open it with that '
                'size, and resize() it then, or name another directory'
            )
        needed = {os.path.basename(self._current('rows')): 8 * capacity, 'commit': FILE_BYTES}
        if self.header.version == VERSION:
            needed[os.path.basename(self._current('marks'))] = 8 * capacity
            needed[os.path.basename(self._current('metas'))] = MIN_BYTES
        for column in self.header.columns:
            row_bytes = np.dtype(column.dtype).itemsize * int(np.prod(column.shape))
            needed.update({column.file: row_bytes * capacity} if row_bytes else {})
        for name, num_bytes in needed.items():
            check_size(self.file(name), num_bytes)

    def _recover(self) -> None:
        """What a kill left undone; may itself be killed at any point. What is damaged is refused before that."""
        repaired = self._marks.repaired(self.numbers, self.header.first_row, self.next_row, self._current('rows'))
        self._commits.repair()
        self._remove_orphans()
        numbers, live = self.numbers, np.flatnonzero(repaired != EMPTY)
        changed = np.flatnonzero(numbers != repaired)
        numbers[changed] = repaired[changed]
        self._marks.put(live, numbers[live])
        # Of a row that was copied from one slot to another the first stays, which is the copy.
        first = np.unique(numbers[live], return_index=True)[1]
        numbers[np.delete(live, first)] = EMPTY

    def _convert(self) -> None:
        """Make files of an earlier version those of this one; may be killed at any point, and done again."""
        capacity, numbers = self.header.capacity, self.numbers
        self._marks = _new_marks(self._current('marks'), capacity)
        live = np.flatnonzero(numbers >= 0)
        self._marks.put(live, numbers[live])
        for name in ('metas', 'redo'):
            convert(self._current('metas') if name == 'metas' else self.file('redo'), self.fsync)
        for name in self._value_files():
            SlotValues(self._current(f'{name}.values'), capacity, is_old=True).sync()
        if self.fsync:
            self._marks.sync()
        self._sync_names()
        self._replace(replace(self.header, version=VERSION))

    def _current(self, name: str, generation: Optional[int] = None) -> str:
        """The path of a file that goes by row number, of which each generation has its own."""
        generation = self.generation if generation is None else generation
        return self.file(f'{name}.{generation}' if generation else name)

    def _sync_all(self) -> None:
        """A process before this one may have left what it never synced, names included."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    sync_file(entry.path)
        sync_path(self.path)

    def _sync_names(self) -> None:
        if self.fsync:
            sync_directory(self.path)

    def _value_files(self) -> List[str]:
        end = os.path.basename(self._current('.values'))
        return [name[: -len(end)] for name in os.listdir(self.path) if name.endswith(end)]

    def _remove_orphans(self) -> None:
        named = {column.file for column in self.header.columns}
        for name in os.listdir(self.path):
            if _TEMPORARY.fullmatch(name) or (COLUMN_FILE.fullmatch(name) and name not in named):
                os.unlink(self.file(name))
        self._remove_other_generations()

    def _remove_other_generations(self) -> None:
        for name in os.listdir(self.path):
            found = _OF_GENERATION.fullmatch(name)
            if found is not None and int(found[1] or 0) != self.generation:
                os.unlink(self.file(name))


def check_size(path: str, num_bytes: int) -> None:
    """
    Raises:
        - CorruptPayload: The file is missing, or shorter.
    """
    there = os.path.getsize(path) if os.path.exists(path) else -1
    if there < num_bytes:
        found = 'is missing' if there < 0 else f'has {there} bytes'
        raise CorruptPayload(f'{path!r} {found} where {num_bytes} are needed: it was truncated')


def _refuse_foreign(directory: str) -> None:
    names = os.listdir(directory)
    theirs = sorted(name for name in names if name in (*_OURS, 'header') or COLUMN_FILE.fullmatch(name))
    if theirs and 'lock' not in names:
        raise ConfigError(f'{directory!r} is not the directory of a table, but has files {theirs}; name another one')
    for name in names:
        # Each is checked again when it is opened: here, so that nothing is changed before.
        if name in theirs or name.endswith(('.values', '.record')):
            private_files.check_file(os.path.join(directory, name))


def _refuse_columns(directory: str) -> None:
    """Files of columns come after the first header: without one this is no new table."""
    columns = sorted(name for name in os.listdir(directory) if COLUMN_FILE.fullmatch(name))
    if columns:
        raise CorruptPayload(
            f'{os.path.join(directory, "header")!r} is missing, but there are columns {columns}: the table cannot be '
            'read without it. Bring it back, or remove the directory to begin anew'
        )


def _claim(directory: str) -> OwnerLock:
    path = os.path.join(directory, 'lock')
    private_files.touch(path)
    held = claim(path)
    if held is None:
        raise TableLocked(f'the table in {directory!r} is open already, in this process or another; close() it there')
    return held


def _new_numbers(path: str, capacity: int) -> mmap.mmap:
    """Row numbers of slots that are all free."""
    region = _map(path, 8 * capacity)
    np.frombuffer(region, np.int64)[:] = EMPTY
    return region


def _new_marks(path: str, capacity: int) -> RowChecksums:
    return RowChecksums(_map(path, 8 * capacity), capacity)


def _map(path: str, num_bytes: int) -> mmap.mmap:
    """A file that has at least so many bytes, with all their space: on a full disk, writing to a hole is a SIGBUS."""
    descriptor = private_files.opener(path, os.O_RDWR | os.O_CREAT)
    try:
        reserve(descriptor, path, 0, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)
